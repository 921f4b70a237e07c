"""A proof's reports as a table and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from conformance.proof.check import Report, Result


def table(reports: Sequence[Report]) -> Iterator[str]:
    """A line per part."""
    width = max((len(r.part) for r in reports), default=0)
    for r in reports:
        proved = len(r.results) - len(r.failed)
        seconds = sum(x.seconds for x in r.results)
        note = "" if r.possible else "   no such step is possible: its obligations say nothing"
        yield f"  {r.part:{width}}  {proved:>3} of {len(r.results):<3} proved  {seconds:6.1f} s{note}"


def _failure(report: Report, result: Result) -> Iterator[str]:
    missing = ", ".join(name for name, proved in result.proved.items() if not proved)
    yield f"{report.part}: {result.goal} ({result.place}): not proved by {missing}"
    if result.counterexample:
        yield from ("  " + line for line in result.counterexample.lines())
    else:
        yield "  No finite instance breaks it: it may hold, and the solver wants help (a conjunct, or a simpler one)."


def failures(reports: Sequence[Report]) -> Iterator[str]:
    """Each obligation that failed, with a state and step that breaks it."""
    for report in reports:
        for result in report.failed:
            yield from _failure(report, result)


def summary(module: str, reports: Sequence[Report], seconds: float) -> str:
    """One line on a proof."""
    total = sum(len(r.results) for r in reports)
    failed = sum(len(r.failed) for r in reports)
    empty = sum(not r.possible for r in reports)
    verdict = (
        "proved" if not failed and not empty else f"NOT PROVED ({failed} obligations failed, {empty} parts are empty)"
    )
    return f"{module}: {total - failed} of {total} obligations, for sets of any finite size: {verdict}; {seconds:.0f} s"


def as_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The reports, for other programs."""
    return [asdict(report) for report in reports]
