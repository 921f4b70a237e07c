"""`./dev bench`: runs benchmarks, both connectors in one run, and shows, writes and plots what was found."""

import argparse
import gc
import importlib
import sys
import time
from pathlib import Path

from bench import report
from bench.harness import Findings, Options

BENCHMARKS = {
    "decode_steps": "scheduler CPU of an idle decode step, by number of requests",
    "prefill": "scheduler CPU and metadata of a prefill to 128k tokens",
    "burst": "scheduler CPU and metadata of 1,000 and 100 requests that arrive in one step",
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
    found = measure(names, quick=arguments.quick)
    print(report.table(found.measures))
    if arguments.json:
        report.write_json(arguments.json, found)
    if arguments.results:
        write_results(arguments.results, found)
    return 0


def _listing() -> str:
    return "benchmarks:\n" + "\n".join(f"  {name:<14} {text}" for name, text in BENCHMARKS.items())


def measure(names: list[str], *, quick: bool) -> Findings:
    """All that the named benchmarks find, one after the other."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

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
