"""Every edge of every slice, driven on kvledger, with a refusal sweep at every state."""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvledger_conformance.graph import Graph, export
from kvledger_conformance.ledger_adapter import Divergence, LedgerAdapter

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
    labels: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As in the report."""
        return {
            "name": self.slice, "states": self.states, "edges": self.edges, "edges_covered": self.edges_covered,
            "steps": self.steps, "resets": self.resets, "refusals": self.refusals, "failure": self.failure,
        }  # fmt: skip


def walk(graph: Graph) -> Iterator[int | None]:
    """Numbers of edges in an order in which they can be taken, until all are; None: back to the initial state."""
    parent = _tree(graph)
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
            path = [*_from_start(graph, parent, graph.edges[waiting[0]][0]), waiting[0]]
        for number in path:
            untaken.discard(number)
            yield number
            at = graph.edges[number][2]


def _tree(graph: Graph) -> dict[str, int | None]:
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


def _from_start(graph: Graph, parent: dict[str, int | None], state: str) -> list[int]:
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
                path, back = [number], state
                while (step := came[back]) is not None:
                    path.append(step)
                    back = graph.edges[step][0]
                return path[::-1]
            target = graph.edges[number][2]
            if target not in came:
                came[target] = number
                queue.append(target)
    return []


SLICES = {"store": 1, "retry": 1, "ranks": 0, "load": 1}
"""Slices, and how often each lets a failed store be tried again (`MaxAttempts`)."""


def folders() -> tuple[Path, Path, Path]:
    """The model, the slices, the lock file: of the repository that this package lies in."""
    root = Path(__file__).resolve().parents[2]
    return root / "spec", root / "conformance" / "spec", root / "conformance" / "graph.lock"


def graphs() -> list[Graph]:
    """All slices, fresh from TLC."""
    spec, slices, _ = folders()
    return [export(name, spec, slices) for name in SLICES]


def write_lock(made: list[Graph]) -> None:
    """Keep the graphs' figures for review."""
    folders()[2].write_text(json.dumps({g.name: g.summary() for g in made}, indent=1) + "\n")


def tour(graph: Graph, *, max_attempts: int = 1) -> TourResult:
    """Drive kvledger along every edge; stops at the first divergence, with the labels since the last reset."""
    result = TourResult(graph.name, len(graph.states), len(graph.edges))
    adapter = LedgerAdapter(graph.state(graph.initial[0]))
    covered: set[int] = set()
    swept: set[str] = set()
    try:
        for number in walk(graph):
            if number is None:
                adapter.reset(max_attempts=max_attempts)
                result.resets += 1
                result.labels = []
                continue
            source, action, target = graph.edges[number]
            before, after = graph.state(source), graph.state(target)
            result.labels.append(action)
            adapter.learn(before)
            adapter.learn(after)
            adapter.do(action, before, after)
            wrong = adapter.compare(after)
            if wrong:
                raise Divergence(f"after {action}: {'; '.join(wrong)}")
            result.steps += 1
            covered.add(number)
            if target not in swept:
                swept.add(target)
                result.refusals += adapter.sweep(after)
    except Divergence as divergence:
        result.failure = f"{divergence} (labels since reset: {' '.join(result.labels)})"
    result.edges_covered = len(covered)
    return result
