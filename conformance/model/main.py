"""Command line of the model checker's runner."""

import argparse
import concurrent.futures
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conformance.model import lint, manifest, mutate, readme, story
from conformance.model.manifest import Check
from conformance.tla import java, tlc

JOBS = 2
TIMEOUT_S, DEEP_TIMEOUT_S = 420.0, 5400.0
SHORT_STATES = 50_000
EXAMPLE = """examples:
  ./dev spec                      the set that CI runs
  ./dev spec MC                   one model
  ./dev spec no-pins              one mutant, with its counterexample as a story
  ./dev spec --deep --json out.json
  ./dev spec --cfg no-pins        print the configuration, to run TLC by hand
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="./dev spec", description="Check the TLA+ model with TLC.", epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    return p


def verdict(check: Check, run: tlc.Run, expected: dict[str, int]) -> str:
    """Empty if the run is as it must be, else what is not."""
    if check.expected == "pass":
        if run.result != "pass":
            return f"expected no error, found {run.result} {run.property}".strip()
        found = {"distinct": run.distinct, "depth": run.depth}
    elif check.expected == "assumption":
        return "" if run.result == "assumption" else f"expected a false assumption to be found, found: {run.result}"
    elif check.expected == "either":
        return "" if run.result in {"pass", "invariant"} else f"expected an answer, found: {run.result}"
    else:
        if run.result not in {"invariant", "property"}:
            return f"expected {check.property} to fail, found: {run.result}"
        if run.property and run.property != check.property:
            return f"expected {check.property} to fail, but {run.property} did"
        if not check.shortest:
            return ""
        found = {"trace": len(run.trace)}
    if expected and found != expected:
        return f"figures differ: expected {expected}, found {found}. If that is meant: ./dev spec --record {check.name}"
    return "" if expected else "no recorded figures. Remedy: ./dev spec --record " + check.name


def figures(check: Check, run: tlc.Run) -> dict[str, int]:
    """The figures to record for a run."""
    if check.expected == "pass":
        return {"distinct": run.distinct, "depth": run.depth}
    return {"trace": len(run.trace)} if check.shortest else {}


def one(check: Check, expected: dict[str, int]) -> tlc.Run:
    """Run one check. `expected`: its recorded figures."""
    return tlc.check(
        check.module,
        check.cfg_text(),
        timeout_s=DEEP_TIMEOUT_S if check.deep else TIMEOUT_S,
        coverage=check.coverage,
        short=check.kind != "model" or expected.get("distinct", SHORT_STATES) < SHORT_STATES,
    )


def row(check: Check, run: tlc.Run, wrong: str) -> str:
    """One line of the table."""
    expected = f"violates {check.property}" if check.expected == "violated" else check.expected
    result = run.result if run.result in {"pass", "timeout"} else (f"violates {run.property or check.property}")
    depth = run.depth or len(run.trace)
    mark = "ok" if not wrong else "WRONG"
    return (
        f"{mark:5} {check.name:30} {check.bounds:50} {expected:31} "
        f"{result if wrong else 'as expected':12} {run.distinct:>8} {depth:>5} {run.seconds:7.1f}s"
    )


def chosen(checks: Sequence[Check], names: Sequence[str], deep: bool) -> list[Check]:
    """The checks to run."""
    if not names:
        return [c for c in checks if deep or not c.deep]
    known = {c.name: c for c in checks}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise SystemExit(f"no model, reach check or mutant named {', '.join(unknown)}. See: ./dev spec --list")
    return [known[n] for n in names]


def as_json(done: list[tuple[Check, tlc.Run, str]], seconds: float, jar: str) -> dict[str, object]:
    """The results for `--json`."""
    return {
        "jar": jar,
        "seconds": round(seconds, 1),
        "ok": not any(wrong for _, _, wrong in done),
        "models": [
            {
                "name": c.name, "kind": c.kind, "expected": c.expected, "result": "violated" if r.trace else r.result, "ok": not w,
                "property": c.property, "distinct_states": r.distinct, "depth": r.depth or len(r.trace),
                "seconds": round(r.seconds, 1), "remark": w,
            }
            for c, r, w in done if c.kind in {"model", "reach", "canary"}
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if everything is as expected, 1 if not, 2 if it could not run."""
    options = parser().parse_args(argv)
    checks = manifest.load()
    if options.list:
        for c in checks:
            print(
                f"{c.name:30} {c.kind:8} {'deep ' if c.deep else '     '}{c.property or 'pass':24} {c.mechanism or c.bounds}"
            )
        return 0
    if options.cfg:
        print(chosen(checks, [options.cfg], True)[0].cfg_text(), end="")
        return 0
    try:
        jar = java.describe(java.jar())
        print(f"java: {java.java()}\njar:  {java.jar()}\n      {jar}")
    except java.Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.generated:
        return run_generated(options)
    return run_all(chosen(checks, options.names, options.deep), checks, options, jar)


def run_generated(options: argparse.Namespace) -> int:
    """Run generated mutants: every one is killed, or is a survivor with a reason.

    With `--resume FILE`, results are appended there as they come, and those of the same text are not made again.
    """
    todo = [m for m in mutate.generate() if not options.names or m.name in options.names]
    fates = mutate.recall(options.resume) if options.resume else {}
    reasons, results, wrongs = mutate.survivors(), [], 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(lambda m: fates.get(m.name) or mutate.try_one(m), m): m for m in todo}
        for future in concurrent.futures.as_completed(futures):
            mutant, (model, what) = futures[future], future.result()
            if options.resume and mutant.name not in fates:
                mutate.remember(options.resume, mutant, (model, what))
            fate = (
                f"killed by {what} in {model}" if model else f"survives: {reasons.get(mutant.name, 'NO REASON GIVEN')}"
            )
            bad = what == "NOT A MODULE" or bool(model) == (mutant.name in reasons)
            wrongs += bad
            results.append({"id": mutant.name, "dropped": mutant.old, "model": model, "killed_by": what, "ok": not bad})
            print(f"{'WRONG' if bad else 'ok':5} {mutant.name:32} {fate}", flush=True)
    for name in sorted(reasons.keys() - {m.name for m in mutate.generate()}):
        print(f"WRONG {name:32} has a reason, but there is no such mutant")
        wrongs += 1
    killed = sum(bool(r["model"]) for r in results)
    print(
        f"{len(results)} generated mutants, {killed} killed: {f'{wrongs} NOT as expected' if wrongs else 'all as expected'}"
    )
    if options.json:
        options.json.write_text(json.dumps({"ok": not wrongs, "generated": results}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrongs else 0


def run_all(todo: list[Check], checks: list[Check], options: argparse.Namespace, jar: str) -> int:
    """Run `todo`, print the table and the complaints."""
    expected, started = manifest.counts(), time.monotonic()
    print(f"{'':5} {'model':30} {'bounds':50} {'expected':31} {'result':12} {'states':>8} {'depth':>5} {'time':>8}")
    done: list[tuple[Check, tlc.Run, str]] = []
    longest_first = sorted(todo, key=lambda c: -expected.get(c.name, {}).get("distinct", 0))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(one, c, expected.get(c.name, {})): c for c in longest_first}
        for future in concurrent.futures.as_completed(futures):
            check, run = futures[future], future.result()
            known = check.expected in {"pass", "violated"}
            as_expected = run.result == "pass" if check.expected == "pass" else run.result in {"invariant", "property"}
            if options.record and known and as_expected:
                expected[check.name] = figures(check, run)
                manifest.record({check.name: expected[check.name]})
            wrong = verdict(check, run, expected.get(check.name, {}))
            done.append((check, run, wrong))
            print(row(check, run, wrong), flush=True)
            if wrong:
                print(f"      {wrong}")
            elif check.expected == "either":
                print(f"      this TLC {'is without' if run.result == 'pass' else 'has'} the {check.mechanism}")
            if run.trace and (wrong or options.names):
                print(story.tell(run.trace, run.property or check.property))
            elif wrong and run.result not in {"pass", "timeout", "invariant", "property"}:
                print("\n".join(run.output.splitlines()[-15:]))
    if options.record:
        readme.write()
    complaints = [] if options.names else lint.complaints(checks, done)
    for line in complaints:
        print(f"WRONG {line}")
    seconds = time.monotonic() - started
    wrongs = sum(bool(w) for _, _, w in done) + len(complaints)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = f"{used.ru_utime + used.ru_stime:.0f} s of CPU"
    print(
        f"{len(done)} checks in {seconds:.0f} s, {cpu}: {'all as expected' if not wrongs else f'{wrongs} NOT as expected'}"
    )
    if options.json:
        report = as_json(done, seconds, jar)
        report["complaints"], report["ok"] = complaints, not wrongs
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if wrongs else 0
