"""The commands about the model: `tours`, `twins`, `two-sided` and `summary`. Each answers with its exit status."""

import argparse
import json
from typing import Any

from conformance.refinement import counterexamples, layers, pages, tour, two_sided
from conformance.refinement.twins import table
from conformance.refinement.twins.in_adapter import LEDGER_PATCHES
from conformance.tla import graph
from kvledger_conformance.__main__ import status
from kvledger_conformance.suite import loading


def _say(line: str) -> None:
    print(line, flush=True)


def tours(arguments: argparse.Namespace) -> int:
    """Every edge of every slice (profile nightly: the larger ones, too); `--lock` keeps the graphs' figures first."""
    names = (*tour.SLICES, *tour.NIGHTLY) if arguments.profile == "nightly" or arguments.lock else tour.SLICES
    made = tour.graphs(names)
    if arguments.lock:
        tour.write_lock(made)
    wrong = [*(f"slice {g.name}: {w}" for g in made for w in graph.lint(g)), *graph.check_lock(made, tour.LOCK)]
    rows = []
    for one in made:
        row = tour.tour(one).row()
        rows.append(row)
        _say(
            f"slice {row['name']:8} {row['states']:>7} states {row['edges']:>7} edges {row['edges_covered']:>7} covered "
            f"{row['steps']:>8} steps {row['refusals']:>8} refusals  {row['failure'] or 'no divergence'}"
        )
    for line in wrong:
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"slices": rows, "lint": wrong}, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(pages.tours(rows))
    complete = all(r["edges"] == r["edges_covered"] and r["refusals"] and not r["failure"] for r in rows)
    return status(complete and not wrong)


def twins(arguments: argparse.Namespace) -> int:
    """Every historic bug, put into kvledger: is it found?"""
    loading.target_for("kvledger", None)
    rows = table.run_all(_say)
    if arguments.json:
        arguments.json.write_text(json.dumps({"twins": rows}, indent=1) + "\n")
    return status(all(r["killed"] for r in rows))


def two_sides(arguments: argparse.Namespace) -> int:
    """Each mutant's counterexample on the good code and on its twin.

    `--lock` lets TLC make stale counterexamples anew. With profile ci or nightly, tours are driven on each twin, too. A file is
    the result of `twins --json`: which scenario or machine kills a twin.
    """
    if arguments.lock:
        counterexamples.lock(LEDGER_PATCHES, say=_say)
    stale = counterexamples.stale(LEDGER_PATCHES)
    for line in stale:
        print(f"stale: {line} (two-sided --lock makes it anew)")
    rows = two_sided.rows()
    for row in rows:
        _say(_line(row))
    if arguments.profile != "dev":
        layers.by_tour(rows, say=_say)
    if arguments.files:
        layers.by_twin(rows, json.loads(arguments.files[0].read_text())["twins"])
    if arguments.json:
        arguments.json.write_text(json.dumps({"two_sided": rows, "stale": stale}, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(pages.two_sided(rows))
    return status(not stale and all(r["ok"] for r in rows))


def summary(arguments: argparse.Namespace) -> int:
    """Figures of everything whose JSON result is given."""
    page = pages.summary([json.loads(f.read_text()) for f in arguments.files])
    if arguments.markdown:
        arguments.markdown.write_text(page)
    print(page, end="")
    return status(True)


def _line(row: dict[str, Any]) -> str:
    if row["good"] is None:
        return f"--    {row['mutant']:28} not at this level: {row['out_of_reach'] or 'NO REASON GIVEN'}"
    good, twin = row["good"], row["twin"]
    mark = "ok" if row["ok"] else "WRONG"
    return (
        f"{mark:5} {row['mutant']:28} good code stops at {good['step']} of {good['of']}, {good['action']}: {good['why']}\n"
        f"      {'':28} twin {'goes through' if twin['through'] else 'stops at ' + str(twin['step'])}: {twin['why']}"
    )
