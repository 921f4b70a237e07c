"""Sets: membership, and the operators that make them, each as what membership of it means."""

from collections.abc import Callable

import z3

from conformance.proof.logic import truth
from conformance.proof.syntax import Apply, Expr, Refused
from conformance.proof.translate import Scope, Translator, rule
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
    TupleOf,
    Type,
    Value,
    joined,
    kind,
)  # fmt: skip


def type_of(value: Value) -> Type:
    """The type of a member of an enumerated set or of a Cartesian product."""
    match value:
        case Scalar(type_, _):
            return type_
        case Tuple(items):
            return TupleOf(tuple(type_of(x) for x in items))
        case Set(member, _):
            return SetOf(member)
    raise Mismatch("a function as a member of a set that is written out")


@rule("\\in", "\\notin")
def _in(t: Translator, e: Apply, s: Scope) -> Value:
    found = t.has(t.value(e.args[0], s), t.set(e.args[1], s))
    return truth(found if e.name == "\\in" else z3.Not(found))


@rule("\\subseteq")
def _subset(t: Translator, e: Apply, s: Scope) -> Value:
    return truth(_within(t, t.set(e.args[0], s), t.set(e.args[1], s)))


def _within(t: Translator, inner: Set, outer: Set) -> z3.BoolRef:
    """Whether all members of one set are in another. Nothing is evaluated of the outer one for what is not in the inner."""
    if inner.member == ANYTHING:
        return z3.BoolVal(True)

    def holds(x: Value) -> z3.BoolRef:
        with t.negated():
            inside = t.has(x, inner)
        with t.given(inside):
            return z3.Implies(inside, t.has(x, outer))

    return t.everywhere(inner.member, holds)


@rule("SUBSET")
def _powerset(t: Translator, e: Apply, s: Scope) -> Value:
    of = t.set(e.args[0], s)

    def has(x: Value) -> z3.BoolRef:
        if not isinstance(x, Set):
            raise Mismatch(f"{kind(x)} in a set of sets")
        return _within(t, x, of)

    return Set(SetOf(of.member), has)


def _joined(t: Translator, a: Set, b: Set, has: Callable[[Value], z3.BoolRef]) -> Set:
    return Set(joined(a.member, b.member), has)


@rule("\\union", "\\cup")
def _union(t: Translator, e: Apply, s: Scope) -> Value:
    a, b = (t.set(arg, s) for arg in e.args)
    return _joined(t, a, b, lambda x: z3.Or(t.has(x, a), t.has(x, b)))


@rule("\\intersect", "\\cap")
def _intersection(t: Translator, e: Apply, s: Scope) -> Value:
    a, b = (t.set(arg, s) for arg in e.args)

    def has(x: Value) -> z3.BoolRef:
        first = t.has(x, a)
        with t.given(first):
            return z3.And(first, t.has(x, b))

    return _joined(t, a, b, has)


@rule("\\", "\\setminus")
def _difference(t: Translator, e: Apply, s: Scope) -> Value:
    a, b = (t.set(arg, s) for arg in e.args)

    def has(x: Value) -> z3.BoolRef:
        first = t.has(x, a)
        with t.given(first), t.negated():
            return z3.And(first, z3.Not(t.has(x, b)))

    return _joined(t, a, b, has)


@rule("$SetEnumerate")
def _enumeration(t: Translator, e: Apply, s: Scope) -> Value:
    members = [t.value(arg, s) for arg in e.args]
    type_: Type = ANYTHING
    for member in members:
        type_ = joined(type_, type_of(member))
    return Set(type_, lambda x: z3.Or([t.equal(x, member) for member in members]))


@rule("$SubsetOf")
def _filter(t: Translator, e: Apply, s: Scope) -> Value:
    """{x \\in S : P}"""
    (binder,) = e.binders
    domain = t.set(binder.domain, s)

    def has(x: Value) -> z3.BoolRef:
        inside = t.has(x, domain)
        with t.given(inside):
            return z3.And(inside, t.formula(e.args[0], s.naming(binder.keys[0], x)))

    return Set(domain.member, has)


@rule("$SetOfAll")
def _image(t: Translator, e: Apply, s: Scope) -> Value:
    """{e : x \\in S}"""
    if len(e.binders) != 1 or len(e.binders[0].keys) != 1:
        raise Refused(e.place, "not understood: {e : …} with several names")
    (binder,) = e.binders
    domain = t.set(binder.domain, s)
    member = _looked_at(t, e.args[0], s.naming(binder.keys[0], t.bind(domain.member)[0]))

    def has(y: Value) -> z3.BoolRef:
        x, terms = t.bind(domain.member)
        with t.within(terms):
            inside = t.has(x, domain)
            with t.given(inside), t.either():
                same = t.equal(y, t.value(e.args[0], s.naming(binder.keys[0], x)))
        return t.world.exists(terms, z3.And(inside, same))

    return Set(member, has)


def _looked_at(t: Translator, e: Expr, s: Scope) -> Type:
    """The type of an expression, without noting needs: its value is not used."""
    needs, t.needs = t.needs, None
    try:
        return type_of(t.value(e, s))
    finally:
        t.needs = needs


@rule("$CartesianProd")
def _product(t: Translator, e: Apply, s: Scope) -> Value:
    factors = [t.set(arg, s) for arg in e.args]

    def has(x: Value) -> z3.BoolRef:
        if not isinstance(x, Tuple) or len(x.items) != len(factors):
            raise Mismatch(f"{kind(x)} in a product of {len(factors)} sets")
        return z3.And([t.has(item, factor) for item, factor in zip(x.items, factors, strict=True)])

    return Set(TupleOf(tuple(f.member for f in factors)), has)


@rule("$SetOfFcns")
def _functions(t: Translator, e: Apply, s: Scope) -> Value:
    """[S -> T]"""
    domain, results = (t.set(arg, s) for arg in e.args)

    def has(f: Value) -> z3.BoolRef:
        if not isinstance(f, Function):
            raise Mismatch(f"{kind(f)} in a set of functions")

        def good(x: Value) -> z3.BoolRef:
            with t.given(t.has(x, domain)):
                return z3.Implies(t.has(x, domain), t.has(f.at(x), results))

        with t.either():
            same = t.everywhere(domain.member, lambda x: t.has(x, f.domain) == t.has(x, domain))
            return z3.And(same, t.everywhere(domain.member, good))

    return Set(FunctionOf(domain.member, results.member), has)


def _all_of(type_: Atom, holds: Callable[[z3.ExprRef], z3.BoolRef], t: Translator) -> Set:
    return Set(type_, lambda x: holds(t.terms(x, type_)[0]))


@rule("BOOLEAN", "STRING", "Int", "Nat")
def _standard(t: Translator, e: Apply, s: Scope) -> Value:
    type_ = {"BOOLEAN": BOOLEAN, "STRING": TEXT}.get(e.name, INTEGER)
    return _all_of(type_, (lambda x: x >= 0) if e.name == "Nat" else (lambda _: z3.BoolVal(True)), t)


@rule("..")
def _range(t: Translator, e: Apply, s: Scope) -> Value:
    low, high = (t.number(arg, s) for arg in e.args)
    return _all_of(INTEGER, lambda x: z3.And(low <= x, x <= high), t)


@rule("Cardinality")
def _cardinality(t: Translator, e: Apply, s: Scope) -> Value:
    counted = t.set(e.args[0], s)
    if counted.member == ANYTHING:
        return Scalar(NUMERAL, z3.IntVal(0))
    if not isinstance(counted.member, Atom) or counted.member.name not in t.world.names.finite:
        raise Refused(
            e.place,
            f"Cardinality of a set of {counted.member}: its members must be of one constant set S, with ASSUME IsFiniteSet(S)",
        )
    member, terms = t.bind(counted.member)
    with t.within(terms), t.either():
        holds = t.has(member, counted)
    return Scalar(INTEGER, t.world.count(terms[0], holds, t.bound))


@rule("IsFiniteSet")
def _finite(t: Translator, e: Apply, s: Scope) -> Value:
    of = t.set(e.args[0], s)
    if not isinstance(of.member, Atom) or of.member.name not in t.world.names.finite:
        raise Refused(
            e.place,
            f"IsFiniteSet of a set of {of.member}: only of constant sets that are assumed to be finite, and their subsets",
        )
    return truth(z3.BoolVal(True))
