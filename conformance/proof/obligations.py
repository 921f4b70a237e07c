"""What is to be proved of a module: its invariant is inductive and implies the properties, and every formula means something."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import z3

from conformance.proof import actions, arithmetic, functions, logic, sets, typing  # noqa: F401  (they register what they translate)
from conformance.proof.actions import Action
from conformance.proof.syntax import Apply, Expr, Module, Place, conjuncts
from conformance.proof.translate import Need, Scope, Translator
from conformance.proof.values import Value
from conformance.proof.world import Arbitrary, Names, World
from conformance.tla import tlc

PROOFS = tlc.SPEC / "proofs.toml"


@dataclass(frozen=True, slots=True)
class Proof:
    """Names in a module: what is to be proved of what."""

    module: str
    init: str
    next: str
    invariant: str
    properties: tuple[str, ...]


def load(path: Path = PROOFS) -> list[Proof]:
    """The proofs that the specification lists."""
    return [
        Proof(**{**entry, "properties": tuple(entry["properties"])})
        for entry in tomllib.loads(path.read_text())["proof"]
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """Obligations with the same hypotheses: the initial states, an action, what the invariant implies, or what means anything."""

    kind: str
    name: str
    action: Action | None = None


@dataclass(slots=True)
class Goal:
    """One obligation: that its hypotheses imply a formula."""

    name: str
    place: Place
    hypotheses: list[z3.BoolRef]
    formula: z3.BoolRef
    needs: list[Need] = field(default_factory=list)
    """If the obligation is that expressions mean something: each of the reasons why they might not."""


@dataclass(slots=True)
class Obligations:
    """Goals in one world, and what makes a step: `hypotheses` hold of it, `choices` are what the action chooses, by name."""

    part: Part
    translator: Translator
    hypotheses: list[z3.BoolRef] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    choices: dict[str, Value] = field(default_factory=dict)


MEANING = "means something"


class Prover:
    """The obligations of one proof, part by part, in the world that one asks for.

    Raises:
        Refused: the module has what is not understood, or an action leaves a variable open.
    """

    def __init__(self, module: Module, proof: Proof) -> None:
        self.module = module
        self.proof = proof
        self.names: Names = typing.names(module)
        self.types = typing.types(module, proof.invariant)
        self.actions = list(actions.split(module.body(proof.next)))
        actions.complete(module, proof.init, module.body(proof.init), primed=False)
        for action in self.actions:
            actions.complete(module, action.name, action.body, primed=True)

    def parts(self) -> list[Part]:
        """All groups of obligations."""
        first = [
            Part("initial", self.proof.init),
            Part("meaning", self.proof.invariant),
            Part("implied", self.proof.invariant),
        ]
        return [*first, *(Part("action", action.name, action) for action in self.actions)]

    def invariants(self) -> list[tuple[str, Expr]]:
        """The conjuncts of the invariant, by name."""
        found = conjuncts(self.module.body(self.proof.invariant))
        return [(e.name if isinstance(e, Apply) and e.kind == "defined" else f"line {e.place.line}", e) for e in found]

    def obligations(self, part: Part, world: World) -> Obligations:
        """The obligations of a part."""
        made = Obligations(part, Translator(self.module, world, self.types))
        made.hypotheses += self._assumptions(made.translator)
        match part.kind:
            case "initial":
                self._initial(made)
            case "meaning":
                self._meaning(made)
            case "implied":
                self._implied(made)
            case _:
                self._action(made)
        return made

    def _assumptions(self, t: Translator) -> list[z3.BoolRef]:
        return [t.formula(e, Scope({})) for e in self.module.assumptions]

    def _invariant(self, t: Translator) -> list[z3.BoolRef]:
        return [t.formula(e, Scope({})) for _, e in self.invariants()]

    def _goals(self, made: Obligations, wanted: Sequence[tuple[str, Expr]], primed: bool) -> None:
        with made.translator.negated():
            for name, e in wanted:
                formula = made.translator.formula(e, Scope({}, primed))
                made.goals.append(Goal(name, e.place, made.hypotheses, formula))

    def _meaningful(self, made: Obligations, exprs: Sequence[Expr], scope: Scope) -> None:
        """Adds the obligation that expressions, read one after the other, mean something."""
        t = made.translator
        needs: list[Need] = []
        t.needs = needs
        before: list[z3.BoolRef] = []
        for e in exprs:
            with t.given(*before):
                before.append(t.formula(e, scope))
        t.needs = None
        different = list({need.formula.get_id(): need for need in needs}.values())
        formula = z3.And([need.formula for need in different])
        made.goals.append(Goal(MEANING, exprs[0].place, list(made.hypotheses), formula, different))

    def _initial(self, made: Obligations) -> None:
        body = self.module.body(self.proof.init)
        self._meaningful(made, [body], Scope({}))
        made.hypotheses.append(made.translator.formula(body, Scope({})))
        self._goals(made, self.invariants(), primed=False)

    def _meaning(self, made: Obligations) -> None:
        self._meaningful(made, [e for _, e in self.invariants()], Scope({}))

    def _implied(self, made: Obligations) -> None:
        made.hypotheses += self._invariant(made.translator)
        properties = [(name, self.module.body(name)) for name in self.proof.properties]
        if properties:
            self._meaningful(made, [e for _, e in properties], Scope({}))
        self._goals(made, properties, primed=False)

    def _action(self, made: Obligations) -> None:
        t, action = made.translator, made.part.action
        if action is None:
            raise ValueError(f"part {made.part.name} has no action")
        made.hypotheses += self._invariant(t)
        scope = Scope({})
        for binder in action.binders:
            domain = t.set(binder.domain, scope)
            for key, name in zip(binder.keys, binder.names, strict=True):
                made.choices[name] = chosen = t.new(domain.member, name)
                made.hypotheses.append(t.has(chosen, domain))
                scope = scope.naming(key, chosen)
        self._meaningful(made, [action.body], scope)
        made.hypotheses.append(t.formula(action.body, scope))
        self._goals(made, self.invariants(), primed=True)


def axioms(world: World) -> list[z3.BoolRef]:
    """What holds in a world besides the hypotheses."""
    return world.axioms() if isinstance(world, Arbitrary) else world.rules
