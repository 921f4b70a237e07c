"""Hypothesis state machines: one rule per action, over small pools of prompts and ids, so that things collide.

Several small machines besides the full one: with many rules the combination that matters gets rare, and Hypothesis's
swarm testing already switches rules off per run. A rule whose action does not exist in the state at hand does nothing.
"""

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvledger_conformance.engine import compat
from kvledger_conformance.engine.engine import Engine
from kvledger_conformance.suite import driver, targets
from kvledger_conformance.suite.properties import Impossible, Violation

PROFILES: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 15, "stateful_step_count": 25, "derandomize": True},
    "ci": {"max_examples": 40, "stateful_step_count": 30, "derandomize": True},
    "nightly": {"max_examples": 2000, "stateful_step_count": 60, "derandomize": False},
}

NAMES = st.sampled_from("xyz")
PROMPTS = st.tuples(st.sampled_from(["a", "ab", "abc", "abcd", "b", "bcd", "abd"]), st.integers(0, 3))
TOKENS = st.integers(1, 12)
STOPS = st.sampled_from([0, 0, 0, 1, 2, 3])
PACES = st.sampled_from(["late", "early", "rush"])
LAGS = st.sampled_from(["gpu", "gpu", "none", "worker", "rank0", "rank1"])
"""Without effect while one step is in flight."""
RANKS = st.integers(0, 1)
OPERATIONS = st.sampled_from(["put", "get"])
PHASES = st.sampled_from(["before", "during", "after"])
CODES = st.sampled_from([-200, -600, -704, -707, -900, -1])
CALLS = st.sampled_from(["put", "get", "exists"])
ODD = st.sampled_from(["raise", "raise_after", "short", "long", "none"])
POSITIONS = st.none() | st.integers(0, 2)
FIRST = st.lists(st.tuples(NAMES, PROMPTS, TOKENS, st.integers(0, 3), st.booleans()), min_size=1, max_size=3)

FACTS: dict[str, Callable[[Engine], Any]] = {
    "always": lambda _engine: True,
    "work": lambda engine: engine.busy,
    "idle": lambda engine: not engine.busy,
    "runs": lambda engine: engine.scheduler.running and not engine.starve,
    "gates": lambda engine: engine.world.gates,
    "faults": lambda engine: engine.world.faults,
    "few faults": lambda engine: len(engine.world.faults) < 3,
    "late": lambda engine: engine.world.late(),
    "stored": lambda engine: engine.world.objects,
}
"""What rules depend on, so that Hypothesis does not spend its choices on actions that do not exist."""


@dataclass
class Tally:
    """What the machines did, for the report: floors on it keep a run from passing because nothing happens."""

    actions: Counter[str] = field(default_factory=Counter)
    impossible: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    seen: Counter[str] = field(default_factory=Counter)


class Machine(RuleBasedStateMachine):
    """The common part: an engine per run. Subclasses made by `machine_for` set target, shape, what to look past."""

    target: targets.Target
    shapes: tuple[compat.Shape, ...]
    past: frozenset[str] = frozenset()
    tally = Tally()
    warm = False
    """Whether a run begins with a prompt that is in the store and not in the local cache."""

    def __init__(self) -> None:
        super().__init__()
        self._context: Any = None
        self._driver: driver.Driver | None = None
        self._broken = False

    @initialize(shape=st.integers(0, 3), first=FIRST)
    def start(self, shape: int, first: list[Any]) -> None:
        """An engine of one of the shapes, and a few requests: swarm testing may switch off the rule that adds."""
        chosen = self.shapes[shape % len(self.shapes)]
        self.tally.runs += 1
        self._context = driver.driving(self.target, chosen, self.past)
        self._driver = self._context.__enter__()
        if self.warm:
            self.act("add", name="w", blocks="abcd", tail=1, tokens=2)
            self.act("steps", count=8)
            self.act("forget")
        for name, (blocks, tail), tokens, steps, forget in first:
            self.act("add", name=name, blocks=blocks, tail=tail, tokens=tokens)
            self.act("steps", count=steps)
            if forget:
                self.act("forget")

    def knows(self, fact: str) -> bool:
        """Whether one of `FACTS` holds now."""
        return self._driver is not None and bool(FACTS[fact](self._driver.engine))

    def act(self, action: str, **arguments: Any) -> None:
        """Perform an action; one that does not exist now is left out."""
        if self._driver is None or self._broken:
            return
        try:
            self._driver.do(action, **arguments)
            self.tally.actions[action] += 1
        except Impossible:
            self.tally.impossible[action] += 1
        except BaseException:
            self._broken = True
            raise

    def teardown(self) -> None:
        """Every run ends with `finish`, and the engine is taken down whatever happened."""
        if self._driver is None:
            return
        try:
            if not self._broken:
                self._note_what_was_seen(self._driver.engine)
                self.act("finish")
        finally:
            self._context.__exit__(None, None, None)
            self._driver = None

    def _note_what_was_seen(self, engine: Engine) -> None:
        requests = [r for _, r in engine.all_requests()]
        facts = {
            "preemption": any(r.num_preemptions for r in requests),
            "load": bool(engine.attempts),
            "id reused": bool(engine.ended),
            "call held": bool(engine.world.held()),
            "late copy": bool(engine.world.late()),
            "store": any(t.operation == "put" for t in engine.world.transfers),
            "weights changed": bool(engine.weights),
            "written after it was freed": engine.writes_to_free,
        }
        self.tally.seen.update(name for name, true in facts.items() if true)


class Act:
    """A rule that performs an action while a fact holds; of its arguments, those that are strategies are drawn."""

    def __init__(self, action: str, when: str = "always", **arguments: Any) -> None:
        self.action, self.when, self.arguments = action, when, arguments

    def __set_name__(self, owner: type["Machine"], name: str) -> None:
        """Put the rule into the machine, under the name by which Hypothesis sorts and tells it."""

        def perform(machine: Machine, **drawn: Any) -> None:
            machine.act(self.action, **{**self.arguments, **drawn})

        perform.__name__ = name
        drawn = {key: value for key, value in self.arguments.items() if isinstance(value, st.SearchStrategy)}
        made = rule(**drawn)(perform)  # type: ignore[call-overload]  # mypy thinks `targets` may be among them
        setattr(owner, name, precondition(lambda machine: machine.knows(self.when))(made))


class Requests(Machine):
    """Arrivals, steps, preemption: in every machine."""

    @rule(name=NAMES, prompt=PROMPTS, tokens=TOKENS, stop=STOPS)
    def add(self, name: str, prompt: tuple[str, int], tokens: int, stop: int) -> None:
        self.act("add", name=name, blocks=prompt[0], tail=prompt[1], tokens=tokens, stop=stop)

    step = Act("step", "work", pace=PACES, lag=LAGS)
    plain_step = Act("step", "work")
    steps = Act("steps", "work", count=st.integers(2, 6))
    forget = Act("forget", "stored")
    preempt = Act("preempt", "runs")


class Stores(Requests):
    """Preemption, reuse and id reuse while stores are held: the road to #52360 and #51637."""

    hold_put = Act("hold", rank=RANKS, operation="put", phase=PHASES)
    open_put = Act("open", "gates", rank=RANKS, operation="put")
    abort = Act("abort", "work", name=NAMES, during=st.booleans())


class Loads(Requests):
    """Hits, held loads, aborted loads, failed loads, evictions."""

    warm = True
    hold_get = Act("hold", rank=RANKS, operation="get", phase=PHASES)
    open_get = Act("open", "gates", rank=RANKS, operation="get")
    abort = Act("abort", "work", name=NAMES, during=st.booleans())
    evict = Act("evict", "stored", index=st.integers(0, 40), all_ranks=st.booleans())
    fail_get = Act("fault", "few faults", operation="get", kind="code", rank=RANKS, code=CODES, position=POSITIONS)


class Faults(Requests):
    """Everything that a store can answer wrongly."""

    odd = Act("fault", "few faults", operation=CALLS, kind=ODD, rank=st.none() | RANKS, times=st.integers(1, 2))
    refuse = Act("fault", "few faults", operation=CALLS, kind="code", code=CODES, position=POSITIONS, times=2)
    heal = Act("heal", "faults")


class Late(Requests):
    """Calls that give up while their bytes still move."""

    warm = True
    give_up = Act("fault", "few faults", operation=OPERATIONS, kind="late", rank=RANKS)
    land = Act("land", "late")


class Resets(Requests):
    """Cache resets with and without running requests, and new weights."""

    reset = Act("reset", "stored", running=st.booleans())
    new_weights = Act("new_weights", "idle")
    hold_put = Act("hold", rank=RANKS, operation="put")
    open_put = Act("open", "gates", rank=RANKS, operation="put")


class Everything(Stores, Loads, Faults, Late, Resets):
    """All rules."""

    warm = False


MACHINES: dict[str, type[Machine]] = {
    "stores": Stores,
    "loads": Loads,
    "faults": Faults,
    "late": Late,
    "resets": Resets,
    "everything": Everything,
}

SHAPES = (
    compat.Shape(ranks=1, num_blocks=12),
    compat.Shape(ranks=2, num_blocks=12),
    compat.Shape(ranks=2, num_blocks=17, max_num_batched_tokens=8),
)

TWO_STEPS = (
    *(dataclasses.replace(shape, depth=2) for shape in SHAPES),
    compat.Shape(ranks=1, num_blocks=12, depth=2, role="kv_producer"),
)
"""Two steps in flight, as with asynchronous scheduling."""


def shapes_of(depth: int) -> tuple[compat.Shape, ...]:
    """Shapes with this many steps in flight."""
    return SHAPES if depth == 1 else TWO_STEPS


def machine_for(
    name: str,
    target: targets.Target,
    *,
    past: frozenset[str] = frozenset(),
    shapes: tuple[compat.Shape, ...] = SHAPES,
    reuse_ids: str = "at once",
) -> type[Machine]:
    """The machine `name` against a target. `past`: properties known to be broken, to look for what lies behind."""
    chosen = tuple(dataclasses.replace(s, reuse_ids=reuse_ids) for s in shapes)
    fields = {"target": target, "past": past, "shapes": chosen, "tally": Tally()}
    return type(MACHINES[name].__name__, (MACHINES[name],), fields)


BATCH = 20
"""Runs between two looks at the clock; Hypothesis must not see it."""


def run_machine(
    machine: type[Machine],
    profile: str,
    *,
    seed: int = 0,
    deadline: float | None = None,
    max_examples: int | None = None,
) -> Violation | None:
    """Run one machine; the first violation, with its script, or None. `deadline` (monotonic) ends it early.

    Hypothesis generates; the shrinking is `shrinking.shrink`'s, which works on the recorded script.
    """
    chosen = PROFILES[profile]
    left = chosen["max_examples"] if max_examples is None else max_examples
    seeds = itertools.count(seed) if chosen["derandomize"] else iter(lambda: random.getrandbits(32), None)
    while left > 0 and (deadline is None or time.monotonic() < deadline):
        options = settings(
            max_examples=min(left, BATCH),
            stateful_step_count=chosen["stateful_step_count"],
            deadline=None,
            database=None,
            print_blob=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        left -= BATCH
        try:
            run_state_machine_as_test(hypothesis.seed(next(seeds))(machine), settings=options)
        except Violation as violation:
            return violation
    return None
