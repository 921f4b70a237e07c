"""Which layer kills a mutant's twin: a scenario, a machine, a tour, or the refusal sweep of a tour."""

from collections.abc import Callable
from typing import Any

from conformance.refinement import tour
from conformance.refinement.twins import table as twins
from conformance.refinement.twins.in_adapter import LEDGER_PATCHES
from conformance.refinement.twins.patching import Patch
from conformance.tla.graph import Graph


def killed(patch: Patch, made: Graph) -> dict[str, Any] | None:
    """Where the tour of a slice stops on the patched code: in the tour or its refusal sweep, after how many steps, saying what."""
    with patch():
        result = tour.tour(made)
    if not result.failure:
        return None
    return {"slice": made.name, "in": result.failed_in, "steps": result.steps, "what": result.failure}


def by_tour(rows: list[dict[str, Any]], *, say: Callable[[str], None]) -> None:
    """Adds to each row which tour kills the mutant's twin at this level: the slice that `BY_TOUR` names for this patch."""
    slices = {LEDGER_PATCHES[mutant]: name for mutant, name in twins.BY_TOUR.items()}
    made = {g.name: g for g in tour.graphs(tuple(sorted(set(slices.values()))))}
    known: dict[Patch | None, dict[str, Any] | None] = {
        patch: killed(patch, made[name]) for patch, name in slices.items()
    }
    for row in rows:
        found = row["tour"] = known.get(LEDGER_PATCHES.get(row["mutant"]))
        say(f"tour  {row['mutant']:28} {'none' if found is None else found['slice'] + ': ' + found['in']}")


def by_twin(rows: list[dict[str, Any]], twin_rows: list[dict[str, Any]]) -> None:
    """Adds to each row which scenario or machine kills the mutant's twin."""
    for row in rows:
        found = [t for t in twin_rows if row["mutant"] in t["mutants"]]
        row["suite"] = found[0]["by"] if found and found[0]["killed"] else None
