"""A run as JSON and as one page of Markdown: a table property × result, then each finding's story."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvledger_conformance.suite.properties import PROPERTIES
from kvledger_conformance.suite.runner import Finding, Result


def as_json(result: Result, twins: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The run as plain values; `violations` have `property`, `steps`, `story`."""
    return {
        "target": result.target,
        "vllm": result.vllm,
        "profile": result.profile,
        "seconds": result.seconds,
        "slices": [],
        "twins": twins or [],
        "scenarios": result.scenarios,
        "machines": result.machines,
        "properties": {name: name not in result.broken for name in PROPERTIES},
        "violations": [{**asdict(f), "steps": len(f.script)} for f in result.findings],
    }


def write_json(result: Result, path: Path, twins: list[dict[str, Any]] | None = None) -> None:
    """Write `as_json`."""
    path.write_text(json.dumps(as_json(result, twins), indent=1) + "\n")


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
    lines = [
        f"# Conformance: {result.target}, vLLM {result.vllm}",
        "",
        summary,
        "",
        "| property | | what it says |",
        "| --- | --- | --- |",
    ]
    for name, sentence in PROPERTIES.items():
        verdict = "**broken**" if name in best else "no breach found"
        lines.append(f"| `{name}` | {verdict} | {sentence} |")
    lines += ["", "| scenario | from | result |", "| --- | --- | --- |"]
    lines += [
        f"| {s['name']} | {s['source']} | {'holds' if s['broke'] is None else '`' + s['broke'] + '`'} |"
        for s in result.scenarios
    ]
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
    lines = ["| property | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name in PROPERTIES:
        cells = []
        for result in results:
            steps = [v["steps"] for v in result["violations"] if v["property"] == name]
            cells.append(f"**broken** ({min(steps)})" if steps else "–")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", "| scenario | from | " + " | ".join(heads) + " |", "| --- | --- |" + " --- |" * len(heads)]
    rows = {s["name"]: s["source"] for r in results for s in r["scenarios"]}
    for name, source in rows.items():
        cells = []
        for result in results:
            found = next((s for s in result["scenarios"] if s["name"] == name), None)
            cells.append("does not apply" if found is None else f"`{found['broke']}`" if found["broke"] else "holds")
        lines.append(f"| {name} | {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
