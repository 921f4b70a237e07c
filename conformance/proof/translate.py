"""From TLA+ expressions to formulas, and to what must hold for them to mean anything.

Nothing is assumed about f[x] for an x outside f's domain, EXCEPT on a key that is not there, CHOOSE without a candidate, CASE
without an arm that holds: each is a *need*, to be proved from what stands to the left of it (as TLC would evaluate it).
The operators themselves are in `logic`, `sets`, `functions` and `arithmetic`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import z3

from conformance.proof.syntax import Apply, Expr, Module, Number, Old, Place, Refused, Text, Unread
from conformance.proof.values import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMERAL,
    TEXT,
    Atom,
    Function,
    FunctionOf,
    Mismatch,
    Scalar,
    Set,
    SetOf,
    Tuple,
    Type,
    Value,
    atoms,
    flat,
    joined,
    joined_atoms,
    kind,
    unflat,
)  # fmt: skip
from conformance.proof.world import World


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean where an expression stands."""

    names: "Mapping[str, Value | Later]"
    primed: bool = False
    old: Value | None = None

    def naming(self, key: str, value: "Value | Later") -> "Scope":
        """This scope with one more name."""
        return replace(self, names={**self.names, key: value})


@dataclass(frozen=True, slots=True)
class Later:
    """An argument as it was written: TLA+ replaces parameters by expressions, which may then come under a prime."""

    expr: Expr
    scope: Scope


@dataclass(frozen=True, slots=True)
class Need:
    """What must hold for an expression to mean anything."""

    place: Place
    what: str
    formula: z3.BoolRef


@dataclass(slots=True)
class _Context:
    """Where the translation is: names bound around, what may be taken for granted, and which way a formula counts."""

    bound: list[z3.ExprRef] = field(default_factory=list)
    path: list[z3.BoolRef] = field(default_factory=list)
    asserted: bool | None = True
    """True: as it stands; False: under a negation; None: both, or it cannot be said."""


Rule = Callable[["Translator", Apply, Scope], Value]
RULES: dict[str, Rule] = {}
"""The built-in operators that are understood, by SANY's names."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers what translates the operators of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Translator:
    """Translates the expressions of one module in one world. `types` are those of the module's variables, if known."""

    def __init__(self, module: Module, world: World, types: Mapping[str, Type]) -> None:
        self.module = module
        self.world = world
        self.variables = {
            (name, primed): self._variable(type_, "next " * primed + name, ())
            for name, type_ in types.items()
            for primed in (False, True)
        }
        self.needs: list[Need] | None = None
        self._at = _Context()

    # ---- what names stand for

    def _variable(self, type_: Type, name: str, arguments: tuple[z3.ExprRef, ...]) -> Value:
        """The value of a state variable: unknown functions, one argument per level."""

        def symbol(of: Type, suffix: str, sort: z3.SortRef, terms: Sequence[z3.ExprRef]) -> z3.ExprRef:
            sorts = [a.sort() for a in arguments] + [self.world.sort(atom) for atom in atoms(of)]
            return z3.Function(name + suffix, *sorts, sort)(*arguments, *terms)

        match type_:
            case SetOf(member):
                return Set(member, lambda x: symbol(member, "", z3.BoolSort(), self.terms(x, member)))
            case FunctionOf(argument, result):
                domain = Set(
                    argument,
                    lambda x: symbol(
                        argument, ".domain" * (len(arguments) + 1), z3.BoolSort(), self.terms(x, argument)
                    ),
                )
                return Function(domain, lambda x: self._variable(result, name, (*arguments, *self.terms(x, argument))))
            case Atom():
                atom = INTEGER if type_ == NUMERAL else type_
                sorts = [a.sort() for a in arguments]
                return Scalar(atom, z3.Function(name, *sorts, self.world.sort(atom))(*arguments))
        raise Refused(
            Place(self.module.name, 1, 1), f"variable {name} is a {type_}: only elements, sets and functions can be"
        )

    def terms(self, value: Value, type_: Type) -> list[z3.ExprRef]:
        """The terms of a value where one of that type is wanted."""
        return list(flat(self.cast(value, type_)))

    def cast(self, value: Value, type_: Type) -> Value:
        """A numeral as the element that it stands for; other values as they are.

        Raises:
            Mismatch: the value is not of that type.
        """
        match value, type_:
            case Scalar(found, term), Atom():
                wanted = joined_atoms(found, INTEGER if type_ == NUMERAL else type_)
                if found == NUMERAL and wanted not in (NUMERAL, INTEGER) and isinstance(term, z3.IntNumRef):
                    return Scalar(wanted, self.world.numeral(wanted, term.as_long()))
                return Scalar(wanted, term)
            case Tuple(items), _ if not isinstance(type_, (Atom, SetOf, FunctionOf)) and len(items) == len(type_.items):
                return Tuple(tuple(self.cast(x, t) for x, t in zip(items, type_.items, strict=True)))
        raise Mismatch(f"{kind(value)} where {type_} is wanted")

    def new(self, type_: Type, hint: str) -> Value:
        """An unknown value of a type, as a constant: what an action chooses."""
        return (
            self._variable(type_, self.world.fresh(hint), ()) if not _is_tuple(type_) else self._new_tuple(type_, hint)
        )

    def _new_tuple(self, type_: Type, hint: str) -> Value:
        return unflat(type_, iter([z3.Const(self.world.fresh(hint), self.world.sort(a)) for a in atoms(type_)]))

    def chosen(self, type_: Type, hint: str) -> Value:
        """An unknown value that depends on the names bound around."""
        if isinstance(type_, (SetOf, FunctionOf)):
            return self._variable(type_, self.world.fresh(hint), tuple(self._at.bound))
        sorts = [x.sort() for x in self._at.bound]
        made = [z3.Function(self.world.fresh(hint), *sorts, self.world.sort(a))(*self._at.bound) for a in atoms(type_)]
        return unflat(type_, iter(made))

    def bind(self, type_: Type) -> tuple[Value, list[z3.ExprRef]]:
        """A bound name of a flat type, and its terms. Names go by depth, so that equal formulas are equal terms."""
        depth = len(self._at.bound)
        terms = [z3.Const(f"{atom}.{depth + i}", self.world.sort(atom)) for i, atom in enumerate(atoms(type_))]
        return unflat(type_, iter(terms)), terms

    # ---- where the translation is

    @property
    def bound(self) -> Sequence[z3.ExprRef]:
        """The names bound around what is translated now."""
        return self._at.bound

    @property
    def asserted(self) -> bool | None:
        """How what is translated now counts: as it stands, negated, or either (None)."""
        return self._at.asserted

    @contextlib.contextmanager
    def within(self, bound: Sequence[z3.ExprRef]) -> Iterator[None]:
        """Names are bound around what is translated inside."""
        self._at.bound += bound
        try:
            yield
        finally:
            del self._at.bound[len(self._at.bound) - len(bound) :]

    @contextlib.contextmanager
    def given(self, *conditions: z3.BoolRef) -> Iterator[None]:
        """What is translated inside is only evaluated if these hold."""
        self._at.path += conditions
        try:
            yield
        finally:
            del self._at.path[len(self._at.path) - len(conditions) :]

    @contextlib.contextmanager
    def counting_as(self, asserted: bool | None) -> Iterator[None]:
        """What is translated inside counts as it stands, negated, or either."""
        before, self._at.asserted = self._at.asserted, asserted
        try:
            yield
        finally:
            self._at.asserted = before

    def negated(self) -> contextlib.AbstractContextManager[None]:
        """What is translated inside counts the other way round."""
        return self.counting_as(None if self._at.asserted is None else not self._at.asserted)

    def either(self) -> contextlib.AbstractContextManager[None]:
        """What is translated inside counts as it stands and negated."""
        return self.counting_as(None)

    def need(self, place: Place, what: str, condition: z3.BoolRef) -> None:
        """Notes what must hold here."""
        if self.needs is None or z3.is_true(z3.simplify(condition)):
            return
        formula = z3.Implies(z3.And(self._at.path), condition) if self._at.path else condition
        bound = list(self._at.bound)
        self.needs.append(Need(place, what, self.world.forall(bound, formula) if bound else formula))

    # ---- expressions

    def value(self, expr: Expr, scope: Scope) -> Value:
        """The value of an expression.

        Raises:
            Refused: it has something that is not understood; with its place.
        """
        try:
            return self._value(expr, scope)
        except Mismatch as wrong:
            raise Refused(expr.place, str(wrong)) from wrong

    def _value(self, expr: Expr, scope: Scope) -> Value:
        match expr:
            case Number(_, number):
                return Scalar(NUMERAL, z3.IntVal(number))
            case Text(_, text):
                return Scalar(TEXT, self.world.text(text))
            case Unread(place, what):
                raise Refused(place, f"not understood: {what}")
            case Old(place):
                if scope.old is None:
                    raise Refused(place, "@ outside of EXCEPT")
                return scope.old
        return self._applied(expr, scope)

    def _applied(self, expr: Apply, scope: Scope) -> Value:
        match expr.kind:
            case "variable":
                return self.variables[expr.name, scope.primed]
            case "constant":
                return Set(Atom(expr.name), lambda x: self.world.member(expr.name, self.terms(x, Atom(expr.name))[0]))
            case "parameter":
                return self._parameter(expr, scope)
            case "defined":
                return self._defined(expr, scope)
        if expr.name not in RULES:
            raise Refused(expr.place, f"not understood: operator {expr.name}")
        return RULES[expr.name](self, expr, scope)

    def _parameter(self, expr: Apply, scope: Scope) -> Value:
        if expr.args:
            raise Refused(expr.place, f"not understood: {expr.name}, an operator given as an argument")
        found = scope.names[expr.key]
        if isinstance(found, Later):
            return self.value(found.expr, replace(found.scope, primed=found.scope.primed or scope.primed))
        return found

    def _defined(self, expr: Apply, scope: Scope) -> Value:
        definition = self.module.definitions[expr.key]
        arguments = {p: Later(a, scope) for p, a in zip(definition.parameters, expr.args, strict=True)}
        return self.value(definition.body, replace(scope, names={**scope.names, **arguments}))

    def formula(self, expr: Expr, scope: Scope) -> z3.BoolRef:
        """The formula of an expression that is a truth value."""
        value = self.value(expr, scope)
        if not (isinstance(value, Scalar) and value.type == BOOLEAN):
            raise Refused(expr.place, f"{kind(value)} where a truth value is wanted")
        term: z3.BoolRef = value.term
        return term

    def set(self, expr: Expr, scope: Scope) -> Set:
        """The value of an expression that is a set."""
        value = self.value(expr, scope)
        if not isinstance(value, Set):
            raise Refused(expr.place, f"{kind(value)} where a set is wanted")
        return value

    def number(self, expr: Expr, scope: Scope) -> z3.ArithRef:
        """The term of an expression that is a number."""
        value = self.value(expr, scope)
        if not (isinstance(value, Scalar) and value.type in (INTEGER, NUMERAL)):
            raise Refused(expr.place, f"{kind(value)} where a number is wanted")
        term: z3.ArithRef = value.term
        return term

    def has(self, member: Value, of: Set) -> z3.BoolRef:
        """Whether a set has a member. {} has none of any type."""
        return z3.BoolVal(False) if of.member == ANYTHING else of.has(member)

    def everywhere(self, type_: Type, holds: Callable[[Value], z3.BoolRef]) -> z3.BoolRef:
        """Whether something holds of every value of a flat type."""
        value, terms = self.bind(type_)
        with self.within(terms):
            body = holds(value)
        return self.world.forall(terms, body)

    def equal(self, a: Value, b: Value) -> z3.BoolRef:
        """Whether two values are equal: sets by their members, functions by their domains and what they give there.

        Raises:
            Mismatch: they are of different kinds, so that it cannot be said.
        """
        match a, b:
            case Scalar(), Scalar():
                type_ = joined_atoms(a.type, b.type)
                x, y = self.terms(a, type_)[0], self.terms(b, type_)[0]
                same: z3.BoolRef = x == y
                return same
            case Tuple(), Tuple() if len(a.items) == len(b.items):
                return z3.And([self.equal(x, y) for x, y in zip(a.items, b.items, strict=True)])
            case Set(), Set():
                with self.either():
                    return self._equal_sets(a, b)
            case Function(), Function():
                with self.either():
                    domains = self._equal_sets(a.domain, b.domain)
                    return z3.And(
                        domains,
                        self.everywhere(joined(a.domain.member, b.domain.member), lambda x: self._agree(a, b, x)),
                    )
        raise Mismatch(f"{kind(a)} compared with {kind(b)}")

    def _equal_sets(self, a: Set, b: Set) -> z3.BoolRef:
        type_ = joined(a.member, b.member)
        if type_ == ANYTHING:
            return z3.BoolVal(True)
        return self.everywhere(type_, lambda x: self.has(x, a) == self.has(x, b))

    def _agree(self, a: Function, b: Function, x: Value) -> z3.BoolRef:
        inside = self.has(x, a.domain)
        with self.given(inside, self.has(x, b.domain)):
            return z3.Implies(inside, self.equal(a.at(x), b.at(x)))

    def choice(self, condition: z3.BoolRef, a: Value, b: Value) -> Value:
        """IF: one of two values. What is inside of sets and functions is evaluated later, then under the condition, too.

        Raises:
            Mismatch: they are of different kinds.
        """
        match a, b:
            case Scalar(), Scalar():
                type_ = joined_atoms(a.type, b.type)
                return Scalar(type_, z3.If(condition, self.terms(a, type_)[0], self.terms(b, type_)[0]))
            case Tuple(), Tuple() if len(a.items) == len(b.items):
                return Tuple(tuple(self.choice(condition, x, y) for x, y in zip(a.items, b.items, strict=True)))
            case Set(), Set():
                return self._choice_of_sets(condition, a, b)
            case Function(), Function():
                return self._choice_of_functions(condition, a, b)
        raise Mismatch(f"either {kind(a)} or {kind(b)}")

    def _choice_of_sets(self, condition: z3.BoolRef, a: Set, b: Set) -> Set:
        def has(x: Value) -> z3.BoolRef:
            with self.given(condition):
                yes = self.has(x, a)
            with self.given(z3.Not(condition)):
                no = self.has(x, b)
            return z3.If(condition, yes, no)

        return Set(joined(a.member, b.member), has)

    def _choice_of_functions(self, condition: z3.BoolRef, a: Function, b: Function) -> Function:
        def at(x: Value) -> Value:
            with self.given(condition):
                yes = a.at(x)
            with self.given(z3.Not(condition)):
                no = b.at(x)
            return self.choice(condition, yes, no)

        return Function(self._choice_of_sets(condition, a.domain, b.domain), at)


def _is_tuple(type_: Type) -> bool:
    return not isinstance(type_, (Atom, SetOf, FunctionOf))
