"""Command line of the model checker's runner."""

import argparse
import concurrent.futures
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from conformance.model import lint, manifest, mutate, readme, story
from conformance.model.manifest import Check
from conformance.tla import java, tlc

JOBS = 2
TIMEOUT_S, DEEP_TIMEOUT_S = 420.0, 5400.0
SHORT_STATES = 50_000
EXPECTED = {
    "pass": ({"pass"}, "no error"),
    "violated": ({"invariant", "property"}, "{} to fail"),
    "assumption": ({"assumption"}, "a false assumption"),
    "either": ({"pass", "invariant"}, "an answer"),
}
"""By what a check expects: the results of TLC that are right, and what they are called."""
EXAMPLE = """examples:
  ./dev spec                      the set that CI runs
  ./dev spec MC                   one model
  ./dev spec no-pins              one mutant, with its counterexample as a story
  ./dev spec --deep --json out.json
  ./dev spec --cfg no-pins        print the configuration, to run TLC by hand
"""
Done = list[tuple[Check, tlc.Run, str]]
"""Each check with its run, and what is wrong with that."""
Item = TypeVar("Item")
Made = TypeVar("Made")


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Check], list[mutate.Mutant]]:
    """The options, and what is to be run: checks, or generated mutants. Ends with status 2 on what it does not know."""
    p = argparse.ArgumentParser(
        prog="./dev spec", description="Check the TLA+ model with TLC.", epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    p.add_argument(
        "names", nargs="*", metavar="MODEL", help="models, reach checks or mutants; default: all that CI runs"
    )
    p.add_argument("--deep", action="store_true", help="also the long models")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    p.add_argument("--list", action="store_true", help="list what can be checked, run nothing")
    p.add_argument("--cfg", metavar="NAME", help="print one configuration, run nothing")
    p.add_argument("--record", action="store_true", help="take the figures of this run as the expected ones")
    p.add_argument(
        "--generated", action="store_true", help="run the generated mutants (an hour); names choose some of them"
    )
    p.add_argument(
        "--resume", type=Path, metavar="FILE", help="with --generated: keep results there, and go on from it"
    )
    p.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"JVMs at a time (default {JOBS})")
    options = p.parse_args(argv)
    if options.resume and not options.generated:
        p.error("--resume goes with --generated")
    if options.generated and (options.deep or options.record or options.cfg or options.list):
        p.error("--generated goes with --resume, --json and --jobs only")
    if options.names and (options.cfg or options.list):
        p.error("--list and --cfg run nothing: no further name goes with them")
    checks, mutants = manifest.load(), mutate.generate() if options.generated else []
    names = [options.cfg] if options.cfg else options.names
    unknown = set(names) - {x.name for x in mutants or checks}
    if unknown:
        kind = "generated mutant" if mutants else "model, reach check or mutant"
        p.error(f"no {kind} is named {', '.join(sorted(unknown))}. See: ./dev spec --list")
    wanted = [c for c in checks if (c.name in names if names else options.deep or not c.deep)]
    return options, wanted, [m for m in mutants if not names or m.name in names]


def figures(check: Check, run: tlc.Run) -> dict[str, int]:
    """The figures of a run that are kept: none if they may differ from run to run."""
    if check.expected == "pass":
        return {"distinct": run.distinct, "depth": run.depth}
    return {"trace": len(run.trace)} if check.expected == "violated" and check.shortest else {}


def verdict(check: Check, run: tlc.Run, expected: dict[str, int]) -> str:
    """Empty if the run is as it must be, else what is not. `expected`: the recorded figures."""
    results, what = EXPECTED[check.expected]
    if run.result not in results:
        return f"expected {what.format(check.property)}, found {run.result} {run.property}".strip()
    if check.expected == "violated" and run.property not in ("", check.property):
        return f"expected {check.property} to fail, but {run.property} did"
    found = figures(check, run)
    if expected and found != expected:
        return f"figures differ: expected {expected}, found {found}. If that is meant: ./dev spec --record {check.name}"
    return "no recorded figures. Remedy: ./dev spec --record " + check.name if found and not expected else ""


def one(check: Check, expected: dict[str, int]) -> tlc.Run:
    """Run one check. `expected`: its recorded figures."""
    return tlc.check(
        check.module,
        check.cfg_text(),
        timeout_s=DEEP_TIMEOUT_S if check.deep else TIMEOUT_S,
        coverage=check.coverage,
        short=check.kind != "model" or expected.get("distinct", SHORT_STATES) < SHORT_STATES,
    )


def side_by_side(work: Callable[[Item], Made], todo: Iterable[Item], jobs: int) -> Iterator[tuple[Item, Made]]:
    """Each item with what `work` makes of it, as they are done."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, item): item for item in todo}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()


def show(check: Check, run: tlc.Run, wrong: str, *, told: bool) -> None:
    """One line of the table, and below it what is wrong; with `told`, the story of a counterexample that is meant, too."""
    expected = f"violates {check.property}" if check.expected == "violated" else check.expected
    result = run.result if run.result in {"pass", "timeout"} else f"violates {run.property or check.property}"
    print(
        f"{'WRONG' if wrong else 'ok':5} {check.name:30} {check.bounds:50} {expected:31} "
        f"{result if wrong else 'as expected':12} {run.distinct:>8} {run.depth or len(run.trace):>5} {run.seconds:7.1f}s",
        flush=True,
    )
    if wrong:
        print(f"      {wrong}")
    elif check.expected == "either":
        print(f"      this TLC {'is without' if run.result == 'pass' else 'has'} the {check.mechanism}")
    if run.trace and (wrong or told):
        print(story.tell(run.trace, run.property or check.property))
    elif wrong and run.result not in {"pass", "timeout", "invariant", "property"}:
        print("\n".join(run.output.splitlines()[-15:]))


def as_json(done: Done) -> dict[str, object]:
    """The results for `--json`."""
    return {
        "models": [
            {
                "name": c.name, "kind": c.kind, "expected": c.expected, "result": "violated" if r.trace else r.result, "ok": not w,
                "property": c.property, "distinct_states": r.distinct, "depth": r.depth or len(r.trace),
                "seconds": round(r.seconds, 1), "remark": w,
            }
            for c, r, w in done if c.kind != "mutant"
        ],
        "mutants": [
            {
                "id": c.name, "source": c.source, "mechanism": c.mechanism, "expected_property": c.property,
                "killed_by": (r.property or c.property) if r.result in {"invariant", "property"} else None,
                "trace_length": len(r.trace), "ok": not w, "seconds": round(r.seconds, 1),
            }
            for c, r, w in done if c.kind == "mutant"
        ],
    }  # fmt: skip


def write(file: Path | None, values: dict[str, object]) -> None:
    """Write a result as JSON, if there is a file for it."""
    if file:
        file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if everything is as expected, 1 if not, 2 if it could not run."""
    options, checks, mutants = read(argv)
    if options.list:
        for c in manifest.load():
            what = f"{c.property or 'pass':24} {c.mechanism or c.bounds}"
            print(f"{c.name:30} {c.kind:8} {'deep ' if c.deep else '     '}{what}")
        return 0
    if options.cfg:
        print(checks[0].cfg_text(), end="")
        return 0
    try:
        jar = java.describe(java.jar())
        print(f"java: {java.java()}\njar:  {java.jar()}\n      {jar}")
    except java.Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_generated(mutants, options) if options.generated else run_all(checks, options, jar)


def run_generated(todo: list[mutate.Mutant], options: argparse.Namespace) -> int:
    """Run generated mutants: every one is killed, or is a survivor with a reason.

    With `--resume FILE`, results are appended there as they come, and those of the same text are not made again.
    """
    fates = mutate.recall(options.resume) if options.resume else {}
    reasons, results, wrongs = mutate.survivors(), [], 0
    for mutant, (model, what) in side_by_side(lambda m: fates.get(m.name) or mutate.try_one(m), todo, options.jobs):
        if options.resume and mutant.name not in fates:
            mutate.remember(options.resume, mutant, (model, what))
        fate = f"killed by {what} in {model}" if model else f"survives: {reasons.get(mutant.name, 'NO REASON GIVEN')}"
        bad = what == "NOT A MODULE" or bool(model) == (mutant.name in reasons)
        wrongs += bad
        results.append({"id": mutant.name, "dropped": mutant.old, "model": model, "killed_by": what, "ok": not bad})
        print(f"{'WRONG' if bad else 'ok':5} {mutant.name:32} {fate}", flush=True)
    for name in sorted(reasons.keys() - {m.name for m in mutate.generate()}):
        print(f"WRONG {name:32} has a reason, but there is no such mutant")
        wrongs += 1
    killed = sum(bool(r["model"]) for r in results)
    print(f"{len(results)} generated mutants, {killed} killed: {said(wrongs)}")
    write(options.json, {"ok": not wrongs, "generated": results})
    return 1 if wrongs else 0


def said(wrongs: int) -> str:
    """How a run ended."""
    return f"{wrongs} NOT as expected" if wrongs else "all as expected"


def run_all(todo: list[Check], options: argparse.Namespace, jar: str) -> int:
    """Run `todo`, print the table and the complaints."""
    kept, started, done = manifest.counts(), time.monotonic(), Done()
    print(f"{'':5} {'model':30} {'bounds':50} {'expected':31} {'result':12} {'states':>8} {'depth':>5} {'time':>8}")
    longest_first = sorted(todo, key=lambda c: -kept.get(c.name, {}).get("distinct", 0))
    for check, run in side_by_side(lambda c: one(c, kept.get(c.name, {})), longest_first, options.jobs):
        if options.record and run.result in EXPECTED[check.expected][0]:
            kept[check.name] = figures(check, run)
            manifest.record({check.name: kept[check.name]})
        wrong = verdict(check, run, kept.get(check.name, {}))
        done.append((check, run, wrong))
        show(check, run, wrong, told=bool(options.names))
    if options.record:
        readme.write()
    complaints = [] if options.names else lint.complaints(manifest.load(), done)
    for line in complaints:
        print(f"WRONG {line}")
    seconds = time.monotonic() - started
    wrongs = sum(bool(w) for _, _, w in done) + len(complaints)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(done)} checks in {seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU: {said(wrongs)}")
    outcome = {"jar": jar, "seconds": round(seconds, 1), "ok": not wrongs, "complaints": complaints}
    write(options.json, outcome | as_json(done))
    return 1 if wrongs else 0
