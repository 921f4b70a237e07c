"""Pages about the model's side: tours, two-sided bugs, and the summary of everything that was run."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvledger_conformance.suite.report import table


def tours(rows: list[dict[str, Any]]) -> str:
    """A table of tours, with a line for all."""
    columns = ["states", "edges", "edges_covered", "steps", "refusals"]
    body = [[r["name"], *(r[c] for c in columns), r["failure"] or "none"] for r in rows]
    body.append(["all", *(sum(r[c] for r in rows) for c in columns), ""])
    return "\n".join(table(["slice", "states", "edges", "covered", "steps", "refusals", "divergences"], body)) + "\n"


INTRODUCTION = """\
# Two-sided bugs

Each wrong version of the model (`spec/mutants/registry.toml`) stands for a bug. TLC's shortest counterexample of it is
driven on kvledger's scheduler side and rank ledgers, twice. On the **good code** it must stop: kvledger refuses a step, does
something else than the wrong model, or is not in the bad state at the end. "3 of 9" is the state at which that happens, as
`./dev spec ID` numbers them. On the **twin**, the code with the same bug in it, it must go through: the code's state is the
wrong model's after every step, and at the end the property is broken in the code, too.

Written by `./dev conformance two-sided`; what the columns rest on: `conformance/README.md`.

"""


def two_sided(rows: list[dict[str, Any]]) -> str:
    """The page `docs/results/two-sided.md`."""
    replayed = [r for r in rows if r["good"] is not None]
    right = sum(r["ok"] for r in replayed)
    count = (
        f"{len(rows)} mutants, {len(replayed)} replayed: {right} stop on the good code and go through on the twin. The other "
        f"{len(rows) - len(replayed)} cannot be replayed at this level; the reason stands in their line."
    )
    lines = [count, ""]
    body = [[f"`{r['mutant']}`", r["source"], f"`{r['property']}`", *_sides(r), _killed(r)] for r in rows]
    lines += table(
        ["mutant", "stands for", "breaks", "on the good code", "on the twin", "the suite kills the twin by"], body
    )
    return INTRODUCTION + "\n".join(lines) + "\n"


def _sides(row: dict[str, Any]) -> tuple[str, str]:
    good, twin = row["good"], row["twin"]
    if good is None:
        return f"not replayed: {row['out_of_reach'] or 'NO REASON GIVEN'}", "not replayed"
    stops = (
        f"GOES THROUGH: {good['why']}"
        if good["through"]
        else f"{good['step']} of {good['of']}, {good['action']}: {good['why']}"
    )
    through = twin["why"] if twin["through"] else f"STOPS at {twin['step']}, {twin['action']}: {twin['why']}"
    return stops, through


def _killed(row: dict[str, Any]) -> str:
    tour = row.get("tour")
    parts = [row.get("suite"), tour and f"{tour['in']} of slice {tour['slice']}"]
    return "; ".join(filter(None, parts)) or "–"


Rows = Iterator[list[str]]


def summary(results: list[dict[str, Any]]) -> str:
    """One table over JSON results of any commands: what was run, and what came out."""
    rows = [row for result in results for known, tell in _TELLS.items() if known in result for row in tell(result)]
    return "\n".join(table(["what", "figures", "result"], rows)) + "\n"


def _models(result: dict[str, Any]) -> Rows:
    passed = [m for m in result["models"] if m["kind"] == "model"]
    reached = [m for m in result["models"] if m["kind"] == "reach"]
    mutants = result.get("mutants", [])
    states = sum(m["distinct_states"] for m in passed)
    good = "as expected" if result["ok"] else "NOT as expected"
    yield ["models of the specification", f"{len(passed)} models, {states:,} distinct states", good]
    yield ["interesting situations of the models", f"{len(reached)}", f"{sum(m['ok'] for m in reached)} reached"]
    yield ["mutants of the model", f"{len(mutants)}", f"{sum(bool(m['killed_by']) for m in mutants)} killed"]


def _slices(result: dict[str, Any]) -> Rows:
    rows = result["slices"]
    if not rows:
        return
    total = {c: sum(r[c] for r in rows) for c in ("states", "edges", "edges_covered", "steps", "refusals")}
    wrong = [r["name"] for r in rows if r["failure"]]
    figures = f"{len(rows)} slices, {total['states']:,} states, {total['edges']:,} edges"
    covered = f"{total['edges_covered']:,} edges covered in {total['steps']:,} steps"
    yield ["tours on the model's graph", figures, covered]
    yield ["refusal sweep", f"{total['refusals']:,} attempts", f"divergences: {', '.join(wrong) or 'none'}"]


def _two_sides(result: dict[str, Any]) -> Rows:
    rows = result["two_sided"]
    replayed = [r for r in rows if r["good"] is not None]
    right = f"{sum(r['ok'] for r in replayed)} stop on the good code and go through on the twin"
    yield ["two-sided bugs", f"{len(replayed)} of {len(rows)} counterexamples replayed", right]


def _twins(result: dict[str, Any]) -> Rows:
    rows = result["twins"]
    yield ["twins (bugs put into kvledger)", f"{len(rows)}", f"{sum(r['killed'] for r in rows)} killed"]


def _machines(result: dict[str, Any]) -> Rows:
    rules = Counter[str]()
    for machine in result["machines"]:
        rules.update(machine["by_action"])
    runs = sum(m["runs"] for m in result["machines"])
    broken = sorted({v["property"] for v in result["violations"]})
    who = f"{result['target']}, vLLM {result['vllm']}, profile {result['profile']}"
    figures = (
        f"{len(result['scenarios'])} scenarios; {runs} machine runs, {rules.total():,} rules run of {len(rules)} kinds"
    )
    yield [f"suite on {who}", figures, f"broken: {', '.join(broken) or 'none'}"]


def _traces(result: dict[str, Any]) -> Rows:
    rows = result["traces"]
    accepted = sum(t["accepted"] for t in rows)
    figures = f"{len(rows)} recordings, {sum(t['events'] for t in rows):,} events"
    yield ["recordings of engine runs", figures, f"{accepted} accepted, {len(rows) - accepted} rejected"]


_TELLS = {
    "models": _models,
    "slices": _slices,
    "two_sided": _two_sides,
    "twins": _twins,
    "machines": _machines,
    "traces": _traces,
}
