"""kvledger under vLLM's own scheduler, followed on the model's graph: what is observed must be a path of it.

A tour takes every edge, but drives kvledger without vLLM. Here the engine of the harness runs (vLLM's scheduler and
block pool, kvledger's whole connector, real transfer threads, the stand-in store), and the model watches: at four points
of every step, and after every other action, the engine's state, abstracted, must be that of some model state reached by
the actions that may have happened since. What is hidden (copies under way) makes a *set* of such states; empty is a divergence.
"""

import argparse
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from conformance.refinement import tour
from conformance.refinement.world import Bounds, Divergence, State
from conformance.tla.graph import Graph, export, lint, reached
from kvledger.keys import KeySpace
from kvledger.protocol import Life, TrackerView
from kvledger_conformance.engine import compat
from kvledger_conformance.suite import targets
from kvledger_conformance.suite.driver import Driver, driving
from kvledger_conformance.suite.properties import Impossible, Violation

SLICE = "hooks"
PROMPT = "ab"
NAME = "1"
SHAPE = compat.Shape(num_blocks=3, max_model_len=12, max_num_batched_tokens=4, max_num_seqs=2)
"""Two blocks beside the null block, as the slice has; one block of prompt per step."""
TRANSFERS = frozenset({"RankStart", "DmaMove", "DmaFail", "RankFinish"})
SCHEDULED = frozenset({"AdmitCompute", "Compute", "EmptyStep"})
HAPPENS = {
    "add": frozenset({"Arrive"}),
    "abort": frozenset({"Abort"}),
    "reset": frozenset({"Preempt"}),
    "schedule": SCHEDULED | {"Preempt"},
    "hooks0": TRANSFERS | {"RankAccept", "RankForward", "TakeReports"},
    "update": frozenset({"UpdateFromOutput", "Finish"}),
}
"""Model actions that may have happened when a point is reached. At all others: transfers."""
ACTIONS_PER_RUN = 30


View = tuple[Any, ...]


class LeftSliceError(Exception):
    """The engine has issued more jobs than the slice has: the run is over, and nothing is wrong."""


@dataclass
class WalkResult:
    """What a walk saw."""

    slice: str
    states: int = 0
    edges: int = 0
    possible: int = 0
    """Views of states, and changes of view: states that differ only in what cannot be seen count once."""
    runs: int = 0
    steps: int = 0
    points: int = 0
    left: int = 0
    """Runs that ended because the engine went on beyond the slice."""
    idle: int = 0
    """Steps that core makes only to tell of a finished request; the model has none."""
    widest: int = 0
    """Most model states that were possible at one point."""
    seen: set[View] = field(default_factory=set)
    taken: set[tuple[View, str, View]] = field(default_factory=set)
    """Changes of view on some path that explains what was seen."""
    failure: str = ""
    by_action: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Changes taken, possible in vLLM's order of calls, and in the slice."""

    def row(self) -> dict[str, Any]:
        """As in the report."""
        return {
            "name": self.slice, "level": "vllm", "states": self.states, "states_seen": len(self.seen),
            "edges": self.edges, "edges_possible": self.possible, "edges_covered": len(self.taken), "runs": self.runs,
            "steps": self.steps, "points": self.points, "left_slice": self.left, "idle_steps": self.idle,
            "widest": self.widest, "failure": self.failure, "by_action": self.by_action,
        }  # fmt: skip


def target(bounds: Bounds) -> targets.Target:
    """kvledger as the slice bounds it: direct transfers, no lookups, retries due at once, core may wait for ever."""
    return dataclasses.replace(targets.find("kvledger-direct"), refine=None).with_options(
        enable_lookup=False,
        max_pinned_blocks=bounds.max_pinned,
        max_store_attempts=bounds.max_attempts + 1,
        retry_backoff_s=0.5,
        breaker_open_s=0.5,
        stall_timeout_s=1000.0,
    )


# -- what both sides show --------------------------------------------------


def _due(frontier: int, retry: Iterable[int]) -> frozenset[int]:
    return frozenset(range(frontier + 1, len(PROMPT) + 1)) | frozenset(retry)


def _canonical(tables: Iterable[int], jobs: list[tuple[int, ...]]) -> dict[int, int]:
    """Blocks by order of appearance in the block table and in open jobs: which block it is does not matter."""
    order: dict[int, int] = {}
    for block in [*tables, *(b for job in jobs for b in job)]:
        if block:
            order.setdefault(block, len(order) + 1)
    return order


def of_model(state: State) -> dict[str, Any]:
    """What of a model state can be seen."""
    live = {j: e for j, e in enumerate(state["led"], 1) if e["st"] == "live"}
    items = {j: sorted(state["job"][j - 1]["items"]) for j in live}
    table = list(state["tbl"][0])
    order = _canonical(table, [tuple(b for _, b, _ in items[j]) for j in sorted(live)])
    tracker, row = state["trk"][0], state["rk"][0]
    lives = {"queued": "queued", "running": "running", "quar": "quarantined"}
    flying = bool(state["pipe"][0]["on"])
    return {
        "request": state["rst"][0],
        "full": state["full"][0],
        "table": tuple(order.get(b, 0) for b in table),
        "preempted": bool(state["preempted"]),
        "in flight": flying,
        "told": bool(state["hooked"][0] and state["polled"][0] and state["fwd"][0]),
        "jobs": tuple(
            (
                j,
                tuple((i, order[b], h) for i, b, h in items[j]),
                frozenset(live[j]["rep"]),
                state["job"][j - 1]["gen"] == tracker["gen"],
            )
            for j in sorted(live)
        ),
        "references": tuple(state["ref"][b - 1] for b in order),
        "tracker": (_due(tracker["front"], tracker["retry"]), tuple(tracker["att"])) if tracker["gen"] else None,
        "known": frozenset(state["known"]),
        "rank": frozenset((j, lives[e["st"]]) for j, e in enumerate(row, 1) if e["st"] in lives),
        "reports": frozenset((j, frozenset(e["bad"])) for j, e in enumerate(row, 1) if e["st"] == "ready"),
        "stored": frozenset(h for (h, _), data in state["store"][0].items() if data[0] != "none"),
        "hit": any(h == PROMPT[0] for h in state["cached"]),
        "cached": tuple(state["cached"][b - 1] == PROMPT[0] for b in order),
        "moving": frozenset((j, i) for _, j, i in state["dma"]),
    }


class Watch:
    """The model's side: which states are possible now."""

    def __init__(self, graph: Graph, result: WalkResult) -> None:
        self.graph, self.result = graph, result
        self._shown: dict[str, dict[str, Any]] = {}
        self.possible: set[str] = set()

    def shown(self, name: str) -> dict[str, Any]:
        """`of_model`, once per state."""
        if name not in self._shown:
            self._shown[name] = of_model(self.graph.state(name))
        return self._shown[name]

    def view(self, name: str) -> View:
        """The same, to count by: states that differ only in what cannot be seen (which block it is) are one."""
        return tuple(self.shown(name).values())

    def orderly(self) -> set[tuple[View, str, View]]:
        """Changes that vLLM's order of calls leaves: a request that is through is freed in the call that processes its
        last output, and only aborts come between a step's hooks and its output. An upper bound of what can be taken."""

        def leaving(at: str) -> list[tuple[str, str, str]]:
            seen = self.shown(at)
            through = seen["request"] == "running" and seen["full"] == len(PROMPT) and not seen["in flight"]
            only = {"Finish"} if through else {"Abort", "UpdateFromOutput"} if seen["told"] else None
            edges = [self.graph.edges[number] for number in self.graph.out[at]]
            return [edge for edge in edges if only is None or edge[1] in only]

        states = reached(self.graph.initial, lambda at: [to for _, _, to in leaving(at)])
        return {(self.view(at), action, self.view(to)) for state in states for at, action, to in leaving(state)}

    def totals(self) -> tuple[set[View], set[tuple[View, str, View]]]:
        """Views and changes of view that the slice has."""
        views = {s: self.view(s) for s in self.graph.states}
        return set(views.values()), {(views[s], action, views[t]) for s, action, t in self.graph.edges}

    def can(self, action: str) -> bool:
        """Whether an action is possible now."""
        return any(self.graph.edges[n][1] == action for s in self.possible for n in self.graph.out[s])

    def follow(self, actions: frozenset[str], seen: dict[str, Any], point: str) -> None:
        """Narrow to the states that show `seen`, reached by these actions.

        Raises:
            Divergence: there is none.
        """
        came: dict[str, list[int]] = {s: [] for s in self.possible}
        frontier = list(self.possible)
        while frontier:
            for number in self.graph.out[frontier.pop()]:
                _, action, to = self.graph.edges[number]
                if action in actions:
                    if to not in came:
                        came[to] = []
                        frontier.append(to)
                    came[to].append(number)
        matching = {s for s in came if self.shown(s) == seen}
        self.result.points += 1
        if not matching:
            near = min(came, key=lambda s: sum(self.shown(s)[k] != v for k, v in seen.items()))
            wrong = {k: (v, self.shown(near)[k]) for k, v in seen.items() if self.shown(near)[k] != v}
            raise Divergence(f"at {point}: no model state among {len(came)} shows this; (kvledger, nearest): {wrong}")
        self._note(came, matching)
        self.possible = matching
        self.result.widest = max(self.result.widest, len(matching))

    def _note(self, came: dict[str, list[int]], matching: set[str]) -> None:
        """The view that was seen, and the edges of every path that explains it."""
        self.result.seen |= {self.view(s) for s in matching}
        back, frontier = set(matching), list(matching)
        while frontier:
            for number in came[frontier.pop()]:
                source, action, to = self.graph.edges[number]
                self.result.taken.add((self.view(source), action, self.view(to)))
                if source not in back:
                    back.add(source)
                    frontier.append(source)


# -- the engine's side -----------------------------------------------------


class Follower:
    """One engine, and the watch on it."""

    def __init__(self, driver: Driver, watch: Watch, bounds: Bounds) -> None:
        self.driver, self.watch, self.bounds = driver, watch, bounds
        self.engine = driver.engine
        self.side = self.engine.connector.scheduler_side
        self.letters: dict[bytes, str] = {}
        self.indices: dict[int, tuple[int, ...]] = {}
        self.skipping = False
        self.giving_up = False
        """The request is aborted while the step that runs now runs."""
        self.engine.observe = self.point
        watch.possible = set(watch.graph.initial)

    def point(self, name: str) -> None:
        """The engine is at a point of a step, or an action is over."""
        self._learn()
        if self.side.view().ledger.next_job > self.bounds.max_job + 1:
            raise LeftSliceError
        if name == "schedule" and not self.watch.can("EmptyStep") and not self.engine.last_output.num_scheduled_tokens:
            self.skipping = True  # a request has ended, and the ranks must be told: not a step of the model
            self.watch.result.idle += 1
        if name == "schedule":
            self.giving_up = bool(self.engine.aborting)
        if self.skipping and name in ("schedule", "hooks0"):
            return
        actions = TRANSFERS if self.skipping else HAPPENS.get(name, TRANSFERS)
        if name == "update" and self.giving_up:
            actions |= HAPPENS["abort"]
        self.skipping = False
        self.watch.follow(actions, self.seen(name), name)

    def _learn(self) -> None:
        for request in self.engine.requests.values():
            for letter, h in zip(PROMPT, request.block_hashes, strict=False):
                self.letters.setdefault(bytes(h), letter)
        for j, entry in self.side.view().ledger.led.items():
            self.indices[j] = tuple(i + 1 for i in entry.items)

    def seen(self, point: str) -> dict[str, Any]:
        """What kvledger and vLLM show, in the model's words."""
        ledger, core = self.side.view().ledger, self.engine.scheduler
        request = core.requests.get(NAME)
        status = "none" if request is None else "running" if request in core.running else "waiting"
        table = ([] if request is None else list(core.kv_cache_manager.get_block_ids(NAME)[0])) + [0] * len(PROMPT)
        jobs = sorted(ledger.led.items())
        order = _canonical(table[: len(PROMPT)], [e.job.block_ids for _, e in jobs])
        tracker = ledger.trk.get(NAME)
        rank = self.engine.ranks[0].connector.rank_side.view()
        first = next((h for h, letter in self.letters.items() if letter == PROMPT[0]), None)
        return {
            "request": status,
            "full": 0 if request is None else min(request.num_computed_tokens // SHAPE.block_size, len(PROMPT)),
            "table": tuple(order.get(b, 0) for b in table[: len(PROMPT)]),
            "preempted": bool(core.reset_preempted_req_ids),
            "in flight": point in ("schedule", "hooks0"),
            "told": point == "hooks0",
            "jobs": tuple(
                (
                    j,
                    self._items(j, e.job, order),
                    frozenset(k + 1 for k in e.rep),
                    tracker is not None and tracker.gen == e.job.generation,
                )
                for j, e in jobs
            ),
            "references": tuple(self.engine.pool.blocks[b].ref_cnt for b in order),
            "tracker": None if tracker is None else self._tracker(tracker),
            "known": frozenset(letter for h, letter in self.letters.items() if h in ledger.known),
            "rank": frozenset((j, life.value) for j, life in rank.lives.items()),
            "reports": frozenset((r.job_id, frozenset(self.indices[r.job_id][p] for p in r.bad)) for r in rank.ready),
            "stored": frozenset(
                letter for h, letter in self.letters.items() if self._key(h) in self.engine.world.objects
            ),
            "hit": first is not None and self.engine.pool.get_cached_block(first, [0]) is not None,
            "cached": tuple(first is not None and self._holds(b, first) for b in order),
            "moving": frozenset(
                (j, i) for j, life in rank.lives.items() if life is Life.RUNNING for i in self._moving(j)
            ),
        }

    def _tracker(self, tracker: TrackerView) -> tuple[frozenset[int], tuple[int, ...]]:
        attempts = tuple(tracker.att.get(i, 0) for i in range(len(PROMPT)))
        return _due(tracker.front, (i + 1 for i in tracker.retry)), attempts

    def _holds(self, block: int, block_hash: bytes) -> bool:
        """Whether the prefix cache finds this hash in this block."""
        held = self.engine.pool.blocks[block].block_hash
        return held is not None and bytes(held).startswith(block_hash)

    def _moving(self, j: int) -> Iterable[int]:
        """Indices of a running job whose bytes have not been copied: all, until its put has passed its gate."""
        put = next((t for t in self.engine.world.moving() if t.operation == "put"), None)
        if put is None or put.at == "before":
            return self.indices[j]
        left = put.keys[len(put.keys) // 2 :] if put.at == "during" else []
        names = {self._key(h): i for i, h in enumerate(self.letters, 1)}
        return [names[key] for key in left]

    def _items(self, j: int, job: Any, order: dict[int, int]) -> tuple[tuple[int, int, str], ...]:
        triples = zip(self.indices[j], job.block_ids, job.hashes, strict=True)
        return tuple((i, order[b], self.letters[bytes(h)]) for i, b, h in triples)

    def _key(self, block_hash: bytes) -> str:
        return KeySpace(namespace=self.side.snapshot()["namespace"]).object_key(
            shard=0, group=0, block_hash=block_hash, epoch=self.side.view().ledger.epoch
        )

    # -- choices -----------------------------------------------------------

    def choices(self) -> list[tuple[str, dict[str, Any]]]:
        """Actions that may be tried now."""
        scheduler, world = self.engine.scheduler, self.engine.world
        known, pinned = NAME in scheduler.requests, bool(self.side.view().ledger.pins)
        out: list[tuple[str, dict[str, Any]]] = []
        if not known:
            out.append(("add", {"name": NAME, "blocks": PROMPT, "tail": 0, "tokens": 1}))
        if self.engine.busy:
            out += [("step", {"pace": pace}) for pace in ("late", "early", "rush")]
        if known:
            if pinned or not scheduler.reset_preempted_req_ids:  # else core would step only to tell of the preemption
                out.append(("abort", {"name": NAME}))
            if self.engine.busy:
                out.append(("abort", {"name": NAME, "during": True}))
        if scheduler.running and not self.engine.starve:
            out.append(("reset", {"running": True}))
            if pinned:  # the slice has reset only, which else empties the prefix cache
                out.append(("preempt", {}))
        if world.gates:
            out.append(("open", {}))
        else:
            out += [("hold", {"rank": 0, "operation": "put", "phase": p}) for p in ("before", "during", "after")]
        if not world.faults:
            out.append(("fault", {"operation": "put", "kind": "code", "code": -600}))
        return out

    def perform(self, action: str, arguments: dict[str, Any]) -> None:
        """One action, and a look after it."""
        self.driver.do(action, **arguments)
        self.point(action)


def walk(graph: Graph, bounds: Bounds, *, runs: int, seed: int = 0) -> WalkResult:
    """Random runs that prefer what was tried least where the model stands; ends at the first divergence."""
    result = WalkResult(graph.name)
    watch, chance = Watch(graph, result), random.Random(seed)
    views, changes = watch.totals()
    result.states, result.edges = len(views), len(changes)
    tried: Counter[tuple[frozenset[str], str]] = Counter()
    connector = target(bounds)
    for _ in range(runs):
        result.runs += 1
        with driving(connector, SHAPE) as driver:
            try:
                _run(Follower(driver, watch, bounds), tried, chance)
            except (LeftSliceError, Divergence, Violation) as error:
                cause = error.__cause__ or error
                if not isinstance(cause, LeftSliceError):
                    result.failure = f"{cause}\n{driver.story()}"
                    break
                result.left += 1
            finally:
                result.steps += driver.engine.steps
    totals = Counter(action for _, action, _ in changes)
    possible = watch.orderly()
    result.taken &= possible  # a path that explains what was seen may take a detour that vLLM's order has not
    result.possible = len(possible)
    covered, orderly = (Counter(action for _, action, _ in some) for some in (result.taken, possible))
    result.by_action = {a: (covered[a], orderly[a], total) for a, total in sorted(totals.items())}
    return result


def _run(follower: Follower, tried: Counter[tuple[frozenset[str], str]], chance: random.Random) -> None:
    for _ in range(ACTIONS_PER_RUN):
        where = frozenset(follower.watch.possible)
        choices = follower.choices()
        chance.shuffle(choices)
        action, arguments = min(choices, key=lambda c: tried[where, str(c)])
        tried[where, str((action, arguments))] += 1
        try:
            follower.perform(action, arguments)
        except Impossible:
            continue
    if follower.engine.world.gates:
        follower.perform("open", {})
    follower.driver.do("finish")


RUNS = {"dev": 40, "ci": 150, "nightly": 2000}


def exported() -> Graph:
    """The slice, fresh from TLC."""
    return export(SLICE)


def command(arguments: argparse.Namespace) -> bool:
    """`walk`: walk, and tell what was covered and why the rest was not."""
    graph = exported()
    wrong = lint(graph)
    result = walk(graph, tour.bounds(SLICE), runs=RUNS[arguments.profile])
    covered = f"{len(result.seen)} of {result.states} views seen, {len(result.taken)} of {result.edges} changes"
    effort = f"{result.runs} runs, {result.steps} engine steps, {result.points} comparisons"
    lines = [
        f"slice {result.slice}: {covered} taken, {effort} (at most {result.widest} model states possible at one)",
        f"{result.left} runs went on beyond the slice's jobs; {result.idle} steps were only to tell of an end",
        f"  {'action':18} taken  possible  in the slice",
        *(f"  {name:18} {taken:>5} {most:>9} {total:>13}" for name, (taken, most, total) in result.by_action.items()),
        "possible: in vLLM's order of calls, an upper bound. What else is out of reach, uncounted: core runs a waiting request",
        "when it can, preempts only when nothing comes back, and a queued job starts as soon as its lane is free",
        *wrong,
        result.failure or "no divergence",
    ]
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps({"slices": [], "hooks": result.row(), "lint": wrong}, indent=1) + "\n")
    return not wrong and not result.failure and all(taken for taken, _, _ in result.by_action.values())
