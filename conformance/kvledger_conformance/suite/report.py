"""A run as JSON and as one page of Markdown: a table property × result, then each finding's story."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvledger_conformance.suite.properties import PROPERTIES
from kvledger_conformance.suite.runner import Finding, Result


def write_json(result: Result, path: Path) -> None:
    """Write the run as plain values; `violations` have `property`, `steps`, `story`."""
    values = {
        "target": result.target,
        "vllm": result.vllm,
        "profile": result.profile,
        "seconds": result.seconds,
        "scenarios": result.scenarios,
        "machines": result.machines,
        "properties": {name: name not in result.broken for name in PROPERTIES},
        "violations": [{**asdict(f), "steps": len(f.script)} for f in result.findings],
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def shortest(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The shortest finding per property."""
    best: dict[str, Finding] = {}
    for finding in findings:
        known = best.get(finding.property)
        if known is None or len(finding.script) < len(known.script):
            best[finding.property] = finding
    return best


def markdown(result: Result) -> str:
    """One page."""
    best = shortest(result.findings)
    runs = sum(m["runs"] for m in result.machines)
    actions = sum(m["actions"] for m in result.machines)
    summary = (
        f"Profile {result.profile}: {len(result.scenarios)} scenarios, {runs} machine runs, {actions} actions, "
        f"{result.seconds:g} s. Written by `python -m kvledger_conformance`."
    )
    properties = [
        [f"`{name}`", "**broken**" if name in best else "no breach found", sentence]
        for name, sentence in PROPERTIES.items()
    ]
    scenarios = [
        [s["name"], s["source"], "holds" if s["broke"] is None else f"`{s['broke']}`"] for s in result.scenarios
    ]
    lines = [f"# Conformance: {result.target}, vLLM {result.vllm}", "", summary, ""]
    lines += table(["property", "verdict", "what it says"], properties)
    lines += ["", *table(["scenario", "from", "result"], scenarios)]
    if best:
        lines += ["", "## Shortest trace per broken property"]
    for name, finding in best.items():
        source = f" ({finding.source})" if finding.source else ""
        past = f" Looking past: {', '.join(finding.past)}." if finding.past else ""
        lines += ["", f"### `{name}`", "", f"{finding.found_by}{source}.{past}", "", "```", finding.story, "```"]
    return "\n".join(lines) + "\n"


def matrix(results: list[dict[str, Any]]) -> str:
    """Property × target, from JSON results: the number of actions of the shortest trace that breaks it, or a dash."""
    heads = [f"{r['target']}, vLLM {r['vllm']}" for r in results]

    def steps(result: dict[str, Any], name: str) -> str:
        found = [v["steps"] for v in result["violations"] if v["property"] == name]
        return f"**broken** ({min(found)})" if found else "–"

    def end(result: dict[str, Any], name: str) -> str:
        found = next((s for s in result["scenarios"] if s["name"] == name), None)
        return "does not apply" if found is None else f"`{found['broke']}`" if found["broke"] else "holds"

    sources = {s["name"]: s["source"] for r in results for s in r["scenarios"]}
    lines = table(["property", *heads], [[f"`{name}`", *(steps(r, name) for r in results)] for name in PROPERTIES])
    lines += [
        "",
        *table(["scenario", "from", *heads], [[n, f, *(end(r, n) for r in results)] for n, f in sources.items()]),
    ]
    return "\n".join(lines) + "\n"
