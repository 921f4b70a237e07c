"""TLC's own state graph as the oracle: export, load, lint, lock.

A slice is a small configuration of the model (`spec/slices/slice-*.cfg`). TLC writes its labelled state graph; it
is loaded, linted, and compared with `graph.lock`, a reviewed file with states and edges per action.
"""

import json
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from conformance.tla import cfg, tlc, value

TLC_TIMEOUT_S = 300
_NODE = re.compile(r'^(-?\d+) \[label="(.*?)"(,style = filled)?\];?$', re.DOTALL)
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w+)"')


Node = TypeVar("Node")


class GraphError(RuntimeError):
    """The graph cannot be made, or is not one to test by."""


@dataclass
class Graph:
    """States by id (text of each variable), and edges (source, action, target)."""

    name: str
    states: dict[str, str] = field(default_factory=dict)
    initial: list[str] = field(default_factory=list)
    edges: list[tuple[str, str, str]] = field(default_factory=list)
    _parsed: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def out(self) -> dict[str, list[int]]:
        """Numbers of the edges that leave each state."""
        leaving: dict[str, list[int]] = {s: [] for s in self.states}
        for number, (source, _, _) in enumerate(self.edges):
            leaving[source].append(number)
        return leaving

    def state(self, name: str) -> dict[str, Any]:
        """Variables of a state."""
        known = self._parsed.get(name)
        if known is None:
            known = self._parsed[name] = variables(self.states[name])
        return known

    def summary(self) -> dict[str, Any]:
        """What the lock file keeps."""
        actions = Counter(a for _, a, _ in self.edges)
        return {"states": len(self.states), "edges": len(self.edges), "actions": dict(sorted(actions.items()))}


def variables(text: str) -> dict[str, Any]:
    """Variables of a state, as a node of the graph labels it."""
    plain = text.replace("\\\\/", "\\/").replace("/\\\\", "/\\").replace('\\"', '"').replace("\\n", "\n")
    return value.state(plain)


def export(name: str) -> Graph:
    """Let TLC enumerate the slice and load what it writes.

    Raises:
        GraphError: TLC does not finish without error.
    """
    cfg_text = tlc.find(f"slice-{name}.cfg").read_text()
    with tempfile.TemporaryDirectory(prefix="kvledger-graph-") as folder:
        dot = Path(folder, "graph.dot")
        output, code = tlc.launch(
            tlc.find("Export.tla"), cfg_text, Path(folder), timeout_s=TLC_TIMEOUT_S, heap="1g", short=True,
            options=["-dump", "dot,actionlabels", str(dot)],
        )  # fmt: skip
        if code != 0:
            raise GraphError(f"TLC ended with {code} on slice {name}:\n{output[-2000:]}")
        return load(name, dot.read_text(), cfg.parse(cfg_text).replaced)


def load(name: str, text: str, names: dict[str, str] | None = None) -> Graph:
    """Read TLC's dot file. An action that leads to one state in two ways is one edge.

    `names` gives the model's name of an action that another stands in for.
    """
    graph = Graph(name)
    names = names or {}
    seen: set[tuple[str, str, str]] = set()
    for line in text.splitlines():
        statement = line.rstrip()
        edge = _EDGE.match(statement)
        if edge:
            one = (edge[1], names.get(edge[3], edge[3]), edge[2])
            if one not in seen:
                seen.add(one)
                graph.edges.append(one)
            continue
        node = _NODE.match(statement)
        if node:
            graph.states[node[1]] = node[2]
            if node[3]:
                graph.initial.append(node[1])
    return graph


def reached(start: Iterable[Node], after: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Everything that can be reached, the nearest first."""
    found = dict.fromkeys(start)
    todo = deque(found)
    while todo:
        new = [node for node in dict.fromkeys(after(todo.popleft())) if node not in found]
        found.update(dict.fromkeys(new))
        todo.extend(new)
    return list(found)


def lint(graph: Graph) -> list[str]:
    """What makes a graph useless as an oracle; empty if nothing."""
    wrong = []
    if not graph.initial or not graph.edges:
        return ["no initial state or no edge"]
    missing = {s for e in graph.edges for s in (e[0], e[2])} - set(graph.states)
    if missing:
        wrong.append(f"{len(missing)} states without a label")
    loops = [a for s, a, t in graph.edges if s == t]
    if loops:
        wrong.append(f"actions that change nothing: {sorted(set(loops))}")
    found = reached(graph.initial, lambda state: [graph.edges[number][2] for number in graph.out[state]])
    if set(found) != set(graph.states):
        wrong.append(f"{len(graph.states) - len(found)} states cannot be reached")
    return wrong


def read_lock(lock: Path) -> dict[str, Any]:
    """The reviewed file: figures by slice."""
    return dict(json.loads(lock.read_text())) if lock.exists() else {}


def check_lock(graphs: list[Graph], lock: Path) -> list[str]:
    """Differences from the reviewed file."""
    kept = read_lock(lock)
    return [
        f"slice {g.name}: locked {kept.get(g.name)}, now {g.summary()}"
        for g in graphs
        if kept.get(g.name) != json.loads(json.dumps(g.summary()))
    ]
