"""Curves as SVG files that stay the same when they are drawn again from the same figures."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.harness import IN_TREE, KVLEDGER, RAW, Curve

LABELS = {IN_TREE: "in-tree connector", KVLEDGER: "kvledger", RAW: "raw Mooncake call"}
COLOURS = {IN_TREE: "#b3541e", KVLEDGER: "#1f6f8b", RAW: "#888888"}


def write(curve: Curve, path: Path) -> None:
    """One plot, a line per series."""
    with mpl.rc_context({"svg.hashsalt": curve.name, "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, values in curve.series.items():
            points = min(len(curve.x), len(values))
            marker = "o" if points <= 20 else ""
            axes.plot(
                curve.x[:points],
                values[:points],
                label=LABELS.get(name, name),
                color=COLOURS.get(name),
                marker=marker,
                markersize=4,
            )
        if curve.log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(curve.x, [f"{x:,.0f}" for x in curve.x])
        if curve.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(curve.x_name)
        axes.set_ylabel(curve.y_name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
