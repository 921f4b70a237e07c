"""Lets TLC decide whether recordings of real engine runs (`trace_dir`) are behaviours of the model's scheduler side.

    .venv/bin/python spec/trace/check.py FILE…  [--json FILE]

Each recording becomes a TLA+ module of literal events, which `Trace.tla` walks. On rejection: the event, the rules it
broke, and the model's state before it. Exit code 0: all accepted; 1: some rejected; 2: not a recording.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from spectools import env  # noqa: E402 - the runner's own package, beside this script

MODULES = ("Util.tla", "MooncakeStoreTypes.tla", "MooncakeStoreLedger.tla", "trace/Trace.tla")
FIELDS: dict[str, tuple[str, ...]] = {
    "BeginGeneration": ("req", "gen"),
    "EndGeneration": ("req", "gen"),
    "EmitLoad": ("req", "gen", "job", "blocks", "names"),
    "EmitStore": (("req", "gen", "job", "blocks", "names", "storable", "table", "hashes", "frontier", "retry")),
    "ApplyReport": ("job", "rank", "result", "bad", "retry"),
    "Release": ("job", "blocks"),
    "Forget": ("names",),
    "Reset": (),
}
DEFAULTS: dict[str, Any] = {"blocks": [], "names": [], "retry": []}
CFG = """SPECIFICATION TSpec
INVARIANT {invariant}
CONSTANTS
  Reqs <- ReqSet
  Blocks <- BlockSet
  Ranks <- RankSet
  Prompts <- OnePrompt
  Depth = 1
  DeferFree = TRUE
  SyncLoads = {{FALSE}}
  PartSteps = {{FALSE}}
  MaxPinned <- PinBudget
  MaxAttempts = 99
  MaxJob <- NumJobs
  MaxEpoch <- NumResets
"""


class NotATraceError(ValueError):
    """The file is not a recording that can be checked; the message says why."""


@dataclass
class Verdict:
    """What TLC said about one recording. `at` counts events from 0, the header left out."""

    path: Path
    events: int
    accepted: bool
    at: int = 0
    event: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    state: str = ""

    def story(self) -> str:
        """For people."""
        if self.accepted:
            return f"accepted  {self.path.name}: {self.events} events"
        shown = json.dumps(self.event)
        return (
            f"REJECTED  {self.path.name} at event {self.at} of {self.events}\n"
            f"  event: {shown[:600]}\n  rules broken: {', '.join(self.broken) or 'no such event'}\n"
            f"  the model then: {self.state}"
        )


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and events of a recording.

    Raises:
        NotATraceError: not JSON lines, no header, a gap in the numbers, or a kind of run that the model leaves out.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as e:
        raise NotATraceError(f"{path}: {e}") from e
    if not lines or lines[0].get("action") != "Header" or lines[0].get("version") != 1:
        raise NotATraceError(f"{path}: the first line is not a Header of version 1")
    if [e.get("seq") for e in lines] != list(range(len(lines))):
        raise NotATraceError(f"{path}: event numbers have a gap: lines are missing or out of order")
    events = lines[1:]
    for event in events:
        missing = set(FIELDS.get(event["action"], ("?",))) - event.keys() - DEFAULTS.keys()
        if missing:
            raise NotATraceError(f"{path}: event {event['seq']} ({event['action']}) lacks {sorted(missing)}")
        if event.get("sync"):
            raise NotATraceError(f"{path}: synchronous loads are not part of the trace model; record with load_async")
    return lines[0], events


def _tla(value: Any) -> str:
    if value is None:
        return "0"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "<<" + ",".join(map(_tla, value)) + ">>"
    return str(value)


def _event(event: dict[str, Any], requests: dict[str, int]) -> str:
    values = {"action": event["action"], **{k: event.get(k, DEFAULTS.get(k)) for k in FIELDS[event["action"]]}}
    if "req" in values:
        values["req"] = requests.setdefault(values["req"], len(requests) + 1)
    if "retry" in values:
        values["retry"] = [i + 1 for i in values["retry"]]  # the model counts block indices from 1
    if "bad" in values:
        values["bad"] = [i + 1 for i in values["bad"]]
    return "[" + ", ".join(f"{k} |-> {_tla(v)}" for k, v in values.items()) + "]"


def module(header: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """The generated module TraceData."""
    requests: dict[str, int] = {}
    body = ",\n  ".join(_event(e, requests) for e in events)
    jobs = sum(1 for e in events if e["action"] in ("EmitLoad", "EmitStore") and e["job"] is not None)
    longest = max([1, *(len(e.get("table", ())) for e in events), *(len(e.get("blocks", ())) for e in events)])
    facts = {
        "NumEvents": len(events),
        "NumReqs": max(1, len(requests)),
        "NumBlocks": header["blocks"],
        "NumRanks": header["ranks"],
        "NumJobs": jobs + 1,
        "NumResets": sum(e["action"] == "Reset" for e in events),
        "PinBudget": header["max_pinned"],
        "MaxIdx": longest + 1,
    }
    lines = [f"{name} == {value}" for name, value in facts.items()]
    return "\n".join(
        ["---- MODULE TraceData ----", "EXTENDS Naturals", *lines, f"Trace == <<\n  {body}\n>>", "====", ""]
    )


def _tlc(folder: Path, invariant: str, timeout_s: float) -> tuple[int, str]:
    (folder / "Trace.cfg").write_text(CFG.format(invariant=invariant), encoding="utf-8")
    command = [
        env.java(), "-Xmx2g", "-XX:+UseParallelGC", f"-Djava.io.tmpdir={folder}", "-cp", str(env.jar()), "tlc2.TLC",
        "-workers", "1", "-deadlock", "-fp", "0", "-seed", "1", "-metadir", str(folder / "meta"),
        "-config", "Trace.cfg", "Trace",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stdout + done.stderr


def check(path: Path, *, timeout_s: float = 300.0) -> Verdict:
    """One recording.

    Raises:
        NotATraceError: see `read`.
        RuntimeError: TLC itself failed; its output is in the message.
    """
    header, events = read(path)
    folder = Path(tempfile.mkdtemp(prefix="kvledger-trace-"))
    try:
        for name in MODULES:
            shutil.copy(HERE.parent / name, folder)
        (folder / "TraceData.tla").write_text(module(header, events), encoding="utf-8")
        code, output = _tlc(folder, "NotAccepted", timeout_s)
        if code == 12:
            return Verdict(path, len(events), accepted=True)
        if code != 0:
            raise RuntimeError(f"TLC ended with {code}:\n{output[-3000:]}")
        _, output = _tlc(folder, "Report", timeout_s)
        return _rejected(path, events, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rejected(path: Path, events: Sequence[dict[str, Any]], output: str) -> Verdict:
    said = re.findall(r'<<\\"AT\\", (\d+), (\{.*?\}), (.*)>>"?\s*$', output, flags=re.MULTILINE)
    if not said:
        raise RuntimeError(f"the recording was rejected, but TLC did not say where:\n{output[-3000:]}")
    line, rules, state = said[-1]
    at = int(line) - 1
    broken = tuple(re.findall(r"[A-Z]\w+", rules))
    return Verdict(path, len(events), False, at, events[at], broken, f"pinned blocks, open jobs = {state}")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        verdicts = [check(path) for path in options.files]
    except NotATraceError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for verdict in verdicts:
        print(verdict.story())
    if options.json:
        rows = [
            {"file": str(v.path), "events": v.events, "accepted": v.accepted, "at": v.at, "broken": list(v.broken)}
            for v in verdicts
        ]
        options.json.write_text(json.dumps({"traces": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(v.accepted for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
