"""Truth values: connectives, quantifiers, IF, CASE, equality, primes."""

from dataclasses import replace

import z3

from conformance.proof.syntax import Apply, Binder, Expr, Refused, Text
from conformance.proof.translate import Scope, Translator, rule
from conformance.proof.values import BOOLEAN, FunctionOf, Scalar, SetOf, Value


def truth(term: z3.BoolRef) -> Scalar:
    """A formula as a value."""
    return Scalar(BOOLEAN, term)


@rule("TRUE", "FALSE")
def _literal(t: Translator, e: Apply, s: Scope) -> Value:
    return truth(z3.BoolVal(e.name == "TRUE"))


@rule("$ConjList", "\\land")
def _and(t: Translator, e: Apply, s: Scope) -> Value:
    parts: list[z3.BoolRef] = []
    for arg in e.args:
        with t.given(*parts):
            parts.append(t.formula(arg, s))
    return truth(z3.And(parts))


@rule("$DisjList", "\\lor")
def _or(t: Translator, e: Apply, s: Scope) -> Value:
    parts: list[z3.BoolRef] = []
    for arg in e.args:
        with t.given(*(z3.Not(part) for part in parts)):
            parts.append(t.formula(arg, s))
    return truth(z3.Or(parts))


@rule("\\lnot")
def _not(t: Translator, e: Apply, s: Scope) -> Value:
    with t.negated():
        return truth(z3.Not(t.formula(e.args[0], s)))


@rule("=>")
def _implies(t: Translator, e: Apply, s: Scope) -> Value:
    with t.negated():
        left = t.formula(e.args[0], s)
    with t.given(left):
        return truth(z3.Implies(left, t.formula(e.args[1], s)))


@rule("\\equiv", "<=>")
def _equivalent(t: Translator, e: Apply, s: Scope) -> Value:
    with t.either():
        return truth(t.formula(e.args[0], s) == t.formula(e.args[1], s))


@rule("=", "/=")
def _equal(t: Translator, e: Apply, s: Scope) -> Value:
    with t.either():
        same = t.equal(t.value(e.args[0], s), t.value(e.args[1], s))
    return truth(same if e.name == "=" else z3.Not(same))


@rule("'")
def _prime(t: Translator, e: Apply, s: Scope) -> Value:
    return t.value(e.args[0], replace(s, primed=True))


@rule("UNCHANGED")
def _unchanged(t: Translator, e: Apply, s: Scope) -> Value:
    with t.either():
        return truth(t.equal(t.value(e.args[0], replace(s, primed=True)), t.value(e.args[0], s)))


@rule("$IfThenElse")
def _if(t: Translator, e: Apply, s: Scope) -> Value:
    return _branches(t, [(e.args[0], e.args[1])], e.args[2], s)


@rule("$Case")
def _case(t: Translator, e: Apply, s: Scope) -> Value:
    """The arms are taken in order; that they may be is itself a need, unless at most one can hold."""
    arms: list[tuple[Expr, Expr]] = []
    other: Expr | None = None
    for arm in e.args:
        if not isinstance(arm, Apply) or len(arm.args) != 2:
            raise Refused(e.place, "not understood: an arm of CASE")
        if isinstance(arm.args[0], Text) and arm.args[0].value == "$Other":
            other = arm.args[1]
        else:
            arms.append((arm.args[0], arm.args[1]))
    with t.either():
        conditions = [t.formula(condition, s) for condition, _ in arms]
    for i, condition in enumerate(conditions):
        for later in conditions[i + 1 :]:
            t.need(
                e.place,
                "two arms of CASE hold at once: which one is taken is not said",
                z3.Not(z3.And(condition, later)),
            )
    if other is None:
        t.need(e.place, "CASE without an arm that holds", z3.Or(conditions))
        other = arms.pop()[1]
    return _branches(t, arms, other, s)


def _branches(t: Translator, arms: list[tuple[Expr, Expr]], otherwise: Expr, s: Scope) -> Value:
    """IF, ELSE IF, …, ELSE."""
    if not arms:
        return t.value(otherwise, s)
    with t.either():
        condition = t.formula(arms[0][0], s)
    with t.given(condition):
        yes = t.value(arms[0][1], s)
    with t.given(z3.Not(condition)):
        no = _branches(t, arms[1:], otherwise, s)
    return t.choice(condition, yes, no)


@rule("$BoundedForall", "$BoundedExists")
def _quantifier(t: Translator, e: Apply, s: Scope) -> Value:
    return truth(_quantified(t, e, [(key, b) for b in e.binders for key in b.keys], s, s))


def _quantified(t: Translator, e: Apply, todo: list[tuple[str, Binder]], s: Scope, outside: Scope) -> z3.BoolRef:
    """One bound name after the other. A set is chosen, not quantified: possible where it is existential as the formula counts."""
    if not todo:
        return t.formula(e.args[0], s)
    universal = e.name == "$BoundedForall"
    (key, binder), rest = todo[0], todo[1:]
    domain = t.set(binder.domain, outside)
    chosen = isinstance(domain.member, (SetOf, FunctionOf))
    if chosen and t.needs is None and t.asserted is not (not universal):
        raise Refused(
            binder.domain.place, "not understood: all sets quantified over where they cannot be chosen one by one"
        )
    name = binder.names[binder.keys.index(key)]
    value, terms = (t.chosen(domain.member, name), []) if chosen else t.bind(domain.member)
    with t.within(terms):
        with t.negated() if universal else t.counting_as(t.asserted):
            guard = t.has(value, domain)
        with t.given(guard):
            body = _quantified(t, e, rest, s.naming(key, value), outside)
    whole = z3.Implies(guard, body) if universal else z3.And(guard, body)
    if not terms:
        return whole
    return t.world.forall(terms, whole) if universal else t.world.exists(terms, whole)


@rule("$BoundedChoose")
def _choose(t: Translator, e: Apply, s: Scope) -> Value:
    """Some candidate, if there is one."""
    binder = e.binders[0]
    domain = t.set(binder.domain, s)

    def candidate(value: Value) -> z3.BoolRef:
        guard = t.has(value, domain)
        with t.given(guard):
            return z3.And(guard, t.formula(e.args[0], s.naming(binder.keys[0], value)))

    with t.either():
        value, terms = t.bind(domain.member)
        with t.within(terms):
            exists = candidate(value)
        some = t.world.exists(terms, exists)
        t.need(e.place, "CHOOSE without a candidate", some)
        chosen = t.chosen(domain.member, "chosen")
        is_one = z3.Implies(some, candidate(chosen))
    t.world.rules.append(t.world.forall(list(t.bound), is_one) if t.bound else is_one)
    return chosen
