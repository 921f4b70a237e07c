"""Every edge of every slice, driven on kvledger, with a refusal sweep at every state."""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.refusals import sweep
from conformance.refinement.state import differences, forget_views
from conformance.refinement.world import Bounds, Divergence
from conformance.tla.graph import Graph, export, read_lock
from conformance.tla.tlc import find

LOOK_AHEAD = 2000
"""States to look at for an untaken edge before going back to the start."""


@dataclass
class TourResult:
    """What one tour did."""

    slice: str
    states: int
    edges: int
    edges_covered: int = 0
    steps: int = 0
    resets: int = 0
    refusals: int = 0
    failure: str = ""
    failed_in: str = ""
    """What found the failure: the tour, or the refusal sweep."""
    labels: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As in the report."""
        return {
            "name": self.slice, "states": self.states, "edges": self.edges, "edges_covered": self.edges_covered,
            "steps": self.steps, "resets": self.resets, "refusals": self.refusals, "failure": self.failure,
        }  # fmt: skip


def walk(graph: Graph, parent: dict[str, int | None]) -> Iterator[int | None]:
    """Numbers of edges in an order in which they can be taken, until all are; None: back to the initial state."""
    left = {s: list(reversed(out)) for s, out in graph.out.items()}
    untaken = set(range(len(graph.edges)))
    waiting = deque(range(len(graph.edges)))
    at = graph.initial[0]
    yield None
    while untaken:
        while left[at] and left[at][-1] not in untaken:
            left[at].pop()
        path = [left[at].pop()] if left[at] else _ahead(graph, at, untaken)
        if not path:
            while waiting[0] not in untaken:
                waiting.popleft()
            yield None
            path = [*_path(graph, parent, graph.edges[waiting[0]][0]), waiting[0]]
        for number in path:
            untaken.discard(number)
            yield number
            at = graph.edges[number][2]


def tree(graph: Graph) -> dict[str, int | None]:
    """The edge by which breadth-first search from the first initial state enters each state."""
    parent: dict[str, int | None] = {graph.initial[0]: None}
    queue = deque([graph.initial[0]])
    while queue:
        for number in graph.out[queue.popleft()]:
            target = graph.edges[number][2]
            if target not in parent:
                parent[target] = number
                queue.append(target)
    return parent


def _path(graph: Graph, parent: dict[str, int | None], state: str) -> list[int]:
    """Edges to a state, by the edge by which each was entered."""
    path = []
    while (number := parent[state]) is not None:
        path.append(number)
        state = graph.edges[number][0]
    return path[::-1]


def _ahead(graph: Graph, start: str, untaken: set[int]) -> list[int]:
    """Edges to the nearest state with an untaken one, that one included; empty if none is near."""
    came: dict[str, int | None] = {start: None}
    queue = deque([start])
    while queue and len(came) < LOOK_AHEAD:
        state = queue.popleft()
        for number in graph.out[state]:
            if number in untaken:
                return [*_path(graph, came, state), number]
            target = graph.edges[number][2]
            if target not in came:
                came[target] = number
                queue.append(target)
    return []


SLICES = ("store", "retry", "ranks", "load", "sync", "reset", "twojobs", "order", "budget")
"""Slices that every run tours."""
NIGHTLY = ("shared", "loads")
"""Larger ones."""
LOCK = Path(__file__).resolve().parent / "graph.lock"
"""The reviewed file of the graphs' figures."""


def bounds(name: str) -> Bounds:
    """The constants of a slice."""
    return Bounds.read(find(f"slice-{name}.cfg").read_text())


def graphs(names: tuple[str, ...] = SLICES) -> list[Graph]:
    """Slices, fresh from TLC."""
    return [export(name) for name in names]


def write_lock(made: list[Graph]) -> None:
    """Keep the graphs' figures for review; those of slices that are not among them stay."""
    kept = read_lock(LOCK)
    kept.update({g.name: g.summary() for g in made})
    known = {name: kept[name] for name in (*SLICES, *NIGHTLY) if name in kept}
    LOCK.write_text(json.dumps(known, indent=1) + "\n")


def tour(graph: Graph) -> TourResult:
    """Drive kvledger along every edge; stops at the first divergence, with the labels since the last reset."""
    result = TourResult(graph.name, len(graph.states), len(graph.edges))
    try:
        _Tour(graph, result).run()
    except Divergence as divergence:
        result.failure = f"{divergence} (labels since reset: {' '.join(result.labels)})"
    finally:
        forget_views()
    return result


class _Tour:
    def __init__(self, graph: Graph, result: TourResult) -> None:
        self.graph, self.result = graph, result
        self.adapter = LedgerAdapter(graph.state(graph.initial[0]), bounds(graph.name))
        self.parent = tree(graph)
        self.compared: set[str] = set()
        """States whose path in the tree has been compared: the same history again is the same again."""
        self.swept: set[str] = set()
        self.covered: set[int] = set()

    def run(self) -> None:
        start = self.graph.initial[0]
        in_tree = True
        for number in walk(self.graph, self.parent):
            if number is None:
                self.adapter.reset()
                self.result.resets += 1
                self.result.labels = []
                in_tree = True
                self._sweep(start)
                continue
            target = self.graph.edges[number][2]
            in_tree = in_tree and self.parent[target] == number
            self._step(number, known=in_tree and target in self.compared)
            if in_tree:
                self.compared.add(target)
            self._sweep(target)

    def _step(self, number: int, *, known: bool) -> None:
        self.result.failed_in = "tour"
        source, action, target = self.graph.edges[number]
        before, after = self.graph.state(source), self.graph.state(target)
        self.result.labels.append(action)
        self.adapter.do(action, before, after)
        wrong = [] if known else differences(self.adapter, after)
        if wrong:
            raise Divergence(f"after {action}: {'; '.join(wrong)}")
        self.result.steps += 1
        self.covered.add(number)
        self.result.edges_covered = len(self.covered)

    def _sweep(self, name: str) -> None:
        if name in self.swept:
            return
        self.result.failed_in = "refusal sweep"
        self.swept.add(name)
        refused = sweep(self.adapter, self.graph.state(name))
        if not refused:
            raise Divergence("the refusal sweep finds nothing to try here")
        self.result.refusals += refused
