"""Functions and tuples: application, construction, EXCEPT, DOMAIN."""

from collections.abc import Sequence
from dataclasses import replace

import z3

from conformance.proof.syntax import Apply, Expr, Number, Refused
from conformance.proof.translate import Scope, Translator, rule
from conformance.proof.values import Function, Tuple, Value, kind


@rule("$Tuple")
def _tuple(t: Translator, e: Apply, s: Scope) -> Value:
    return Tuple(tuple(t.value(arg, s) for arg in e.args))


@rule("$FcnApply")
def _apply(t: Translator, e: Apply, s: Scope) -> Value:
    function = t.value(e.args[0], s)
    if isinstance(function, Tuple):
        return _part(function, e)
    if not isinstance(function, Function):
        raise Refused(e.place, f"{kind(function)} applied like a function")
    argument = t.value(e.args[1], s)
    t.need(e.place, "a function applied outside of its domain", t.has(argument, function.domain))
    return function.at(argument)


def _part(of: Tuple, e: Apply) -> Value:
    index = e.args[1]
    if not isinstance(index, Number) or not 1 <= index.value <= len(of.items):
        raise Refused(
            e.place, f"a part of a tuple of {len(of.items)} by anything but a numeral from 1 to {len(of.items)}"
        )
    return of.items[index.value - 1]


@rule("DOMAIN")
def _domain(t: Translator, e: Apply, s: Scope) -> Value:
    function = t.value(e.args[0], s)
    if not isinstance(function, Function):
        raise Refused(e.place, f"DOMAIN of {kind(function)}")
    return function.domain


@rule("$FcnConstructor")
def _construct(t: Translator, e: Apply, s: Scope) -> Value:
    """[x \\in S |-> e]"""
    if len(e.binders) != 1 or len(e.binders[0].keys) != 1:
        raise Refused(e.place, "not understood: a function of several names")
    (binder,) = e.binders
    domain = t.set(binder.domain, s)

    def at(x: Value) -> Value:
        x = t.cast(x, domain.member)
        with t.given(t.has(x, domain)):
            return t.value(e.args[0], s.naming(binder.keys[0], x))

    return Function(domain, at)


@rule("$Except")
def _except(t: Translator, e: Apply, s: Scope) -> Value:
    function = t.value(e.args[0], s)
    for change in e.args[1:]:
        if not isinstance(change, Apply) or len(change.args) != 2 or not isinstance(change.args[0], Apply):
            raise Refused(e.place, "not understood: a change in EXCEPT")
        path = [(arg, t.value(arg, s)) for arg in change.args[0].args]
        function = _changed(t, function, path, change.args[1], s, change)
    return function


def _changed(t: Translator, old: Value, path: Sequence[tuple[Expr, Value]], new: Expr, s: Scope, e: Apply) -> Value:
    """`old` with the value at the end of a path of keys replaced."""
    if not path:
        return t.value(new, replace(s, old=old))
    if not isinstance(old, Function):
        raise Refused(e.place, f"EXCEPT on {kind(old)}")
    (key_expr, key), rest = path[0], path[1:]
    there = t.has(key, old.domain)
    t.need(key_expr.place, "EXCEPT on a key that is not there", there)
    with t.given(there):
        inner = _changed(t, old.at(key), rest, new, s, e)

    def at(x: Value) -> Value:
        here = t.equal(x, key)
        with t.given(z3.Not(here)):
            kept = old.at(x)
        return t.choice(here, inner, kept)

    return Function(old.domain, at)
