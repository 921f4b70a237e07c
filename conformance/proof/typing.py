"""What a module's formulas can name, and the types of its variables: read from its assumptions and its invariant."""

from collections.abc import Iterator

from conformance.proof.syntax import Apply, Expr, Module, Number, Old, Place, Refused, Text, Unread, conjuncts, opened
from conformance.proof.translate import Scope, Translator
from conformance.proof.values import SetOf, Type
from conformance.proof.world import Arbitrary, Names


def _texts(expr: Expr) -> Iterator[str]:
    match expr:
        case Text(_, text):
            yield text
        case Apply():
            for part in (*expr.args, *(binder.domain for binder in expr.binders)):
                yield from _texts(part)


def _assumed(module: Module) -> list[Apply]:
    return [part for top in module.assumptions for part in conjuncts(top) if isinstance(part, Apply)]


def names(module: Module) -> Names:
    """The constant sets, string literals, finite sets and numerals that are assumed to be no members."""
    texts = {text for d in module.definitions.values() for text in _texts(d.body)} - {"$Other"}
    finite, numerals = set(), set()
    for part in _assumed(module):
        match part:
            case Apply(name="IsFiniteSet", args=(Apply(kind="constant", name=name),)):
                finite.add(name)
            case Apply(name="\\notin", args=(Number(_, number), Apply(kind="constant", name=name))):
                numerals.add((name, number))
    return Names(tuple(module.constants), tuple(sorted(texts)), frozenset(finite), tuple(sorted(numerals)))


def _declared(module: Module, expr: Expr) -> Iterator[tuple[str, Apply]]:
    """`x \\in S` and `x \\subseteq S` among the conjuncts, with the names of definitions opened."""
    for part in conjuncts(opened(module, expr)):
        inner = opened(module, part)
        if inner is not part:
            yield from _declared(module, inner)
        elif isinstance(inner, Apply) and inner.name in {"\\in", "\\subseteq"}:
            left = inner.args[0]
            if isinstance(left, Apply) and left.kind == "variable":
                yield left.name, inner


def _is_state(expr: Expr) -> bool:
    """Whether an expression names a variable: then it does not give a type."""
    match expr:
        case Number() | Text() | Old() | Unread():
            return False
        case Apply():
            return expr.kind == "variable" or any(map(_is_state, (*expr.args, *(b.domain for b in expr.binders))))


def types(module: Module, invariant: str) -> dict[str, Type]:
    """The types of the variables, from the invariant's conjuncts `x \\in S`, `x \\subseteq S`.

    Raises:
        Refused: a variable has none.
    """
    translator = Translator(module, Arbitrary(names(module)), {})
    found: dict[str, Type] = {}
    for name, conjunct in _declared(module, module.body(invariant)):
        if name not in found and not _is_state(conjunct.args[1]):
            of = translator.set(conjunct.args[1], Scope({}))
            found[name] = of.member if conjunct.name == "\\in" else SetOf(of.member)
    for name in module.variables:
        if name not in found:
            raise Refused(
                Place(module.name, 1, 1),
                f"no conjunct of {invariant} says what {name} is: it wants {name} \\in … or \\subseteq …",
            )
    return {name: found[name] for name in module.variables}
