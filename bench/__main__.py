"""`./dev bench`: runs benchmarks, both connectors in one run, and shows, writes and plots what was found."""

import argparse
import contextlib
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import report
from bench.harness import Findings, Options

BENCHMARKS = {
    "decode_steps": "scheduler CPU of an idle decode step, by number of requests",
    "prefill": "scheduler CPU and metadata of a prefill to 128k tokens",
    "burst": "scheduler CPU and metadata of 1,000 and 100 requests that arrive in one step",
    "rank": "CPU of a rank per block, stored and loaded, 32 and 80 layers; of a lookup per key",
    "transfer": "goodput to and from a store in another process, by segments, beside raw Mooncake calls",
}


def main() -> int:
    """Exit code 0; 2 if the call is wrong."""
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_listing(),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which of them; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does everything run? Not for figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--results", type=Path, metavar="DIR", help="write result.json, result.md and plots there")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and do nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print(_listing())
        return 0
    names = arguments.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; there are: {' '.join(BENCHMARKS)}")
    with logged(arguments.results) as say:
        found = measure(names, quick=arguments.quick, say=say)
    print(report.table(found.measures))
    if arguments.json:
        report.write_json(arguments.json, found)
    if arguments.results:
        write_results(arguments.results, found)
    return 0


def _listing() -> str:
    return "benchmarks:\n" + "\n".join(f"  {name:<14} {text}" for name, text in BENCHMARKS.items())


@contextlib.contextmanager
def logged(folder: Path | None) -> Iterator[Callable[[str], None]]:
    """A way to say something to the person; what libraries write to standard error meanwhile goes to a file."""
    started = time.monotonic()
    sys.stderr.flush()
    person = os.dup(2)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="bench-")) / "log" if folder is None else folder / "log"

    def say(text: str) -> None:
        os.write(person, f"{time.monotonic() - started:6.1f} s  {text}\n".encode())

    with open(path, "wb") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield say
        except BaseException:
            say(f"failed; the log is {path}")
            raise
        finally:
            sys.stderr.flush()
            os.dup2(person, 2)
            os.close(person)


def measure(names: list[str], *, quick: bool, say: Callable[[str], None]) -> Findings:
    """All that the named benchmarks find, one after the other."""
    found = Findings(notes=report.configuration(names, quick=quick))
    for name in names:
        say(f"{name}: {BENCHMARKS[name]}")
        module = importlib.import_module(f"bench.{name}")
        gc.collect()
        gc.freeze()  # as vLLM's engine does once it is up: what was imported is not looked through again and again
        try:
            part: Findings = module.run(Options(quick=quick, say=say))
        finally:
            gc.unfreeze()
        found.measures.extend(part.measures)
        found.curves.extend(part.curves)
        found.notes.update(part.notes)
    return found


def write_results(folder: Path, found: Findings) -> None:
    """result.json, result.md and one SVG per curve."""
    from bench import plots

    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / "result.json", found)
    (folder / "result.md").write_text(report.table(found.measures) + "\n")
    for curve in found.curves:
        plots.write(curve, folder / f"{curve.name}.svg")


if __name__ == "__main__":
    sys.exit(main())
