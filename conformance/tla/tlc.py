"""The one launcher of TLC: a run in a directory of its own, bounded by CPU time, and what its output says."""

import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.tla import java

SPEC = Path(__file__).resolve().parents[2] / "spec"
FOLDERS = (SPEC, SPEC / "models", SPEC / "mutants", SPEC / "slices")
"""Where modules and configurations lie; TLC looks in all of them for what a module EXTENDS."""
RESULTS = {
    0: "pass",
    10: "assumption",
    11: "deadlock",
    12: "invariant",
    13: "property",
    75: "evaluation error",
    150: "parse error",
    151: "config error",
}
OUT_OF_TIME = {-signal.SIGKILL, -signal.SIGXCPU}
WALL_PER_CPU = 8


@dataclass(slots=True)
class Run:
    """Outcome of one model. `trace` holds (action, state text) of a counterexample, in order."""

    result: str
    property: str = ""
    distinct: int = 0
    generated: int = 0
    depth: int = 0
    seconds: float = 0.0
    trace: list[tuple[str, str]] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    output: str = ""


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1].replace(",", "")) if found else 0


def read_trace(output: str) -> list[tuple[str, str]]:
    """The states of the counterexample in TLC's output, each with the action that led to it."""
    heads = list(
        re.finditer(r"^(?:State )?(\d+): (?:<(\w+)[^\n]*>|(Stuttering)|(Back to state[^\n]*))[^\n]*$", output, re.M)
    )
    trace: list[tuple[str, str]] = []
    if not heads:
        alone = re.search(r"violated by the initial state:\n(.*?)\n\n", output, re.S)
        return [("Initial", alone[1])] if alone else []
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = output[head.end() : following.start() if following else len(output)]
        body = re.split(r"\n\n|\nThe coverage|\n\d+ states generated", body.lstrip("\n"))[0]
        trace.append((head[2] or head[3] or head[4], body.strip()))
    return trace


def read_actions(output: str) -> dict[str, int]:
    """Steps generated per action, from the last coverage report."""
    last = output.rfind("The coverage statistics")
    found: dict[str, int] = {}
    for match in re.finditer(r"^<(\w+) line [^>]*>: (\d+):(\d+)$", output[max(last, 0) :], re.M):
        found[match[1]] = found.get(match[1], 0) + int(match[3])
    return found


def read(output: str, code: int) -> Run:
    """What TLC's output and exit code say."""
    run = Run(RESULTS.get(code, f"exit {code}"), output=output)
    named = re.search(r"(?:Invariant|Action property|Temporal property|property) (\w+) (?:is|was) violated", output)
    run.property = named[1] if named else ""
    run.generated = _number(r"([\d,]+) states generated", output)
    run.distinct = _number(r"([\d,]+) distinct states found", output)
    run.depth = _number(r"depth of the complete state graph search is (\d+)", output)
    if code not in (0, 1):
        run.trace = read_trace(output)
    run.actions = read_actions(output)
    return run


def find(name: str) -> Path:
    """The file of a module (`MC.tla`) or configuration (`MC.cfg`).

    Raises:
        FileNotFoundError: no folder of the specification has it.
    """
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name} is in none of {', '.join(f.name for f in FOLDERS)} of the specification")


def launch(
    module: Path,
    cfg_text: str,
    scratch: Path,
    *,
    timeout_s: float,
    heap: str = "2g",
    short: bool = False,
    options: Sequence[str] = (),
    folders: Sequence[Path] = FOLDERS,
) -> tuple[str, int]:
    """Run TLC on the file `module` with a configuration, for `timeout_s` of CPU time; its output and exit code.

    The JVM keeps to `scratch`. A `short` run (below some 50,000 states) is done before the JVM's second compiler pays:
    it runs without it. Modules are looked for beside `module` first, then in `folders`.
    """
    config = scratch / "model.cfg"
    config.write_text(cfg_text, encoding="utf-8")
    (scratch / ".tlaplus").mkdir(exist_ok=True)
    (scratch / ".tlaplus" / "esc.txt").write_text("NO_STATISTICS\n", encoding="utf-8")  # a newer TLC calls home
    jar = java.jar()
    command = [
        java.java(), f"-Xmx{heap}", "-XX:+UseSerialGC", *(["-XX:TieredStopAtLevel=1"] if short else []),
        f"-Djava.io.tmpdir={scratch}", f"-Duser.home={scratch}",
        f"-DTLA-Library={os.pathsep.join(map(str, folders))}", "-cp", str(jar),
        "tlc2.TLC", "-workers", "1", "-deadlock", "-fp", "0", "-seed", "1", "-metadir", str(scratch / "meta"),
        "-config", str(config), *options, *java.options(jar), module.name,
    ]  # fmt: skip
    return _run(command, module.parent, timeout_s)


def _run(command: list[str], folder: Path, timeout_s: float) -> tuple[str, int]:
    """Output and exit code. The limit is on CPU time where the system has one, for a busy machine is not a wrong model."""
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wall_s = timeout_s
        if hasattr(resource, "prlimit"):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(timeout_s), int(timeout_s) + 5))
            wall_s = timeout_s * WALL_PER_CPU
        try:
            output, _ = process.communicate(timeout=wall_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return output, process.returncode


def check(
    module: str,
    cfg_text: str,
    *,
    timeout_s: float,
    heap: str = "2g",
    coverage: bool = False,
    short: bool = False,
    folder: Path | None = None,
) -> Run:
    """Run TLC on a module of the specification (or, of the same name, in `folder`), see `launch`."""
    path, folders = (find(f"{module}.tla"), FOLDERS) if folder is None else (folder / f"{module}.tla", ())
    with tempfile.TemporaryDirectory(prefix="kvledger-tlc-") as scratch:
        started = time.monotonic()
        output, code = launch(
            path, cfg_text, Path(scratch), timeout_s=timeout_s, heap=heap, short=short, folders=folders,
            options=["-coverage", "1"] if coverage else [],
        )  # fmt: skip
    run = read(output, code)
    if code in OUT_OF_TIME:
        run = Run("timeout", output=output, distinct=_number(r"([\d,]+) distinct states found", output))
    run.seconds = time.monotonic() - started
    return run
