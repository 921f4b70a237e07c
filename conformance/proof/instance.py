"""Finite instances: n members per constant set, everything counted. What fails there is shown as a state and a step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import z3

from conformance.proof.obligations import Goal, Obligations, Part, Prover
from conformance.proof.translate import Translator
from conformance.proof.values import (
    BOOLEAN,
    INTEGER,
    NUMERAL,
    Atom,
    Function,
    Scalar,
    Set,
    Tuple,
    Type,
    Value,
    atoms,
    unflat,
)
from conformance.proof.world import Finite

TIMEOUT_MS = 120_000


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A state (or an initial one), and a step from it, as text by name; `why` in words."""

    size: int
    choices: dict[str, str]
    before: dict[str, str]
    after: dict[str, str] = field(default_factory=dict)
    why: str = ""

    def lines(self) -> Iterator[str]:
        """The state, and of the step what it changes."""
        yield f"with {self.size} of each:"
        for name, shown in self.before.items():
            changed = self.after.get(name, shown)
            yield f"  {name} = {shown}" + (f"  ->  {changed}" if changed != shown else "")
        if self.choices:
            yield "  chosen: " + ", ".join(f"{name} = {shown}" for name, shown in self.choices.items())
        if self.why:
            yield f"  {self.why}"


class _Reader:
    """Reads values out of a model of the solver's, as TLC writes them."""

    def __init__(self, world: Finite, model: z3.ModelRef) -> None:
        self.world = world
        self.model = model

    def show(self, value: Value) -> str:
        match value:
            case Scalar(type_, term):
                return self._scalar(type_, self.model.eval(term, model_completion=True))
            case Tuple(items):
                return f"<<{', '.join(map(self.show, items))}>>"
            case Set():
                return "{" + ", ".join(self.show(x) for x in self._members(value)) + "}"
            case Function():
                pairs = [f"{self.show(x)} :> {self.show(value.at(x))}" for x in self._members(value.domain)]
                return f"({' @@ '.join(pairs)})" if pairs else "<<>>"

    def _scalar(self, type_: Atom, found: z3.ExprRef) -> str:
        if type_ in (INTEGER, NUMERAL):
            return str(found)
        if type_ == BOOLEAN:
            return "TRUE" if z3.is_true(found) else "FALSE"
        for label, element in zip(self.world.labels[type_.name], self.world.elements[type_.name], strict=True):
            if element.eq(found):
                return label
        return str(found)

    def _members(self, of: Set) -> Iterator[Value]:
        for value in _all(self.world, of.member):
            if z3.is_true(self.model.eval(of.has(value), model_completion=True)):
                yield value


def _all(world: Finite, type_: Type) -> Iterator[Value]:
    """All values of a flat type."""
    choices: list[list[z3.ExprRef]] = [[]]
    for atom in atoms(type_):
        choices = [[*choice, element] for choice in choices for element in world.all(world.sort(atom))]
    for choice in choices:
        yield unflat(type_, iter(choice))


def _states(t: Translator, reader: _Reader) -> tuple[dict[str, str], dict[str, str]]:
    def shown(primed: bool) -> dict[str, str]:
        return {name: reader.show(value) for (name, is_primed), value in t.variables.items() if is_primed == primed}

    return shown(False), shown(True)


def _solve(made: Obligations, *formulas: z3.BoolRef) -> z3.ModelRef | None:
    """A model of formulas in a finite world, or None if there is none.

    Raises:
        TimeoutError: neither was found in time.
    """
    solver = z3.SolverFor("ALL")
    solver.set("timeout", TIMEOUT_MS)
    solver.add(*made.translator.world.rules, *formulas)
    answer = solver.check()
    if answer == z3.unknown:
        raise TimeoutError(
            f"{made.part.name}: no answer for a finite instance within {TIMEOUT_MS // 1000} s ({solver.reason_unknown()})"
        )
    return solver.model() if answer == z3.sat else None


def counterexample(prover: Prover, part: Part, index: int, size: int) -> Counterexample | None:
    """A step that breaks goal `index` of a part, with `size` members per set, or None if there is none.

    Raises:
        TimeoutError: neither was found in time.
    """
    world = Finite(prover.names, size)
    made = prover.obligations(part, world)
    return _refuted(made, made.goals[index], world)


def _refuted(made: Obligations, goal: Goal, world: Finite) -> Counterexample | None:
    model = _solve(made, *goal.hypotheses, z3.Not(goal.formula))
    if model is None:
        return None
    failing = [n for n in goal.needs if not z3.is_true(model.eval(n.formula, model_completion=True))]
    why = f"{failing[0].place}: {failing[0].what}" if failing else ""
    return _shown(made, world, model, made.part.kind == "action" and not goal.needs, why)


def _shown(made: Obligations, world: Finite, model: z3.ModelRef, step: bool, why: str) -> Counterexample:
    reader = _Reader(world, model)
    before, after = _states(made.translator, reader)
    choices = {name: reader.show(value) for name, value in made.choices.items()}
    return Counterexample(world.size, choices, before, after if step else {}, why)


def example(prover: Prover, part: Part, size: int) -> Counterexample | None:
    """A step (or an initial state) that the hypotheses of a part allow, or None: then its obligations say nothing.

    Raises:
        TimeoutError: neither was found in time.
    """
    world = Finite(prover.names, size)
    made = prover.obligations(part, world)
    model = _solve(made, *made.hypotheses)
    return None if model is None else _shown(made, world, model, part.kind == "action", "")


def holds(prover: Prover, part: Part, size: int) -> Mapping[str, bool]:
    """Whether each goal of a part holds with `size` members per set, all counted."""
    world = Finite(prover.names, size)
    made = prover.obligations(part, world)
    return {goal.name: _refuted(made, goal, world) is None for goal in made.goals}
