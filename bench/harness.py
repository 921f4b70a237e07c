"""How two connectors are compared: their repetitions alternate, medians are compared, the ratio comes with its spread."""

import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

IN_TREE, KVLEDGER, RAW = "in_tree", "kvledger", "raw"
SIDES = (IN_TREE, KVLEDGER)

_GOAL = re.compile(r"(ratio|kvledger|kvledger/raw) ([≥≤]) ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured: one line of the result.

    `better` says whether a lower figure (a cost) or a higher one (goodput, hits) is better. `wanted` is the goal that the
    project has set itself, as "ratio ≥ 8", "kvledger ≤ 1.05" or "ratio ≥ 1.6, kvledger/raw ≥ 0.9".
    """

    name: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    wanted: str = ""

    def __post_init__(self) -> None:
        if not all(_GOAL.fullmatch(goal) for goal in _goals(self.wanted)):
            raise ValueError(f"{self.name}: wanted {self.wanted!r} is not like 'ratio ≥ 8' or 'kvledger/raw ≤ 0.9'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One line of the result file. A figure is None where there is none: no such limit, or a connector that cannot do it."""

    name: str
    unit: str
    better: str
    in_tree: float | None
    kvledger: float | None
    ratio: float | None
    """How many times better kvledger is, whichever way is better: above 1 kvledger wins."""
    spread: tuple[float, float] | None
    """The lowest and the highest ratio of one repetition."""
    raw: float | None
    """What the machine does without a connector."""
    wanted: str
    repetitions: int

    def holds(self) -> bool | None:
        """Whether the wanted value was reached; None if none is wanted, or it cannot be said."""
        verdicts = [self._reached(goal) for goal in _goals(self.wanted)]
        return None if not verdicts or None in verdicts else all(verdicts)

    def _reached(self, goal: str) -> bool | None:
        what, sign, number = goal.split()
        values = {"ratio": self.ratio, "kvledger": self.kvledger, "kvledger/raw": _quotient(self.kvledger, self.raw)}
        value = values[what]
        if value is None:
            return None
        return value >= float(number) if sign == "≥" else value <= float(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points for a plot: one y per x for each name."""

    name: str
    x_name: str
    y_name: str
    x: list[float]
    series: dict[str, list[float]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What one benchmark found."""

    measures: list[Measure] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """Configuration, and what else a reader should see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How thoroughly to measure."""

    quick: bool
    say: Callable[[str], None]

    def repetitions(self, thorough: int, quick: int = 2) -> int:
        """How often to repeat."""
        return quick if self.quick else thorough


class Samples:
    """The figures of one row, one per side and repetition."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._values: dict[str, list[float]] = {IN_TREE: [], KVLEDGER: [], RAW: []}

    def add(self, side: str, value: float) -> None:
        """The next repetition's figure of one side, or of the raw limit."""
        self._values[side].append(value)

    def median(self, side: str) -> float | None:
        """The median so far; None without a figure."""
        values = self._values[side]
        return statistics.median(values) if values else None

    def measure(self) -> Measure:
        """The line of the result."""
        in_tree, kvledger = self.median(IN_TREE), self.median(KVLEDGER)
        pairs = zip(self._values[IN_TREE], self._values[KVLEDGER], strict=False)
        ratios = [ratio for ratio in (self._ratio(a, b) for a, b in pairs) if ratio is not None]
        return Measure(
            name=self.row.name,
            unit=self.row.unit,
            better=self.row.better,
            in_tree=in_tree,
            kvledger=kvledger,
            ratio=self._ratio(in_tree, kvledger),
            spread=(min(ratios), max(ratios)) if ratios else None,
            raw=self.median(RAW),
            wanted=self.row.wanted,
            repetitions=max(len(values) for values in self._values.values()),
        )

    def _ratio(self, in_tree: float | None, kvledger: float | None) -> float | None:
        return _quotient(in_tree, kvledger) if self.row.better == "lower" else _quotient(kvledger, in_tree)


def alternating(repetitions: int) -> Iterator[tuple[str, str]]:
    """The order of the two sides in each repetition: each goes first in every other one."""
    for number in range(repetitions):
        yield (IN_TREE, KVLEDGER) if number % 2 == 0 else (KVLEDGER, IN_TREE)


def _goals(wanted: str) -> list[str]:
    return wanted.split(", ") if wanted else []


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
