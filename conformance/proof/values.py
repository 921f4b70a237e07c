"""What TLA+ expressions are while they are translated: terms, tuples, sets as predicates, functions as applications.

A set is known by what it has, a function by its domain and what it gives: neither is a term of the solver's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import z3


@dataclass(frozen=True, slots=True)
class Atom:
    """Values that are one term. Each constant set names an atom of its own: its members, and the numerals that stand for none."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TupleOf:
    """Tuples of a fixed length."""

    items: "tuple[Type, ...]"

    def __str__(self) -> str:
        return f"<<{', '.join(map(str, self.items))}>>"


@dataclass(frozen=True, slots=True)
class SetOf:
    """Sets of such members."""

    member: "Type"

    def __str__(self) -> str:
        return f"set of {self.member}"


@dataclass(frozen=True, slots=True)
class FunctionOf:
    """Functions."""

    argument: "Type"
    result: "Type"

    def __str__(self) -> str:
        return f"function from {self.argument} to {self.result}"


Type = Atom | TupleOf | SetOf | FunctionOf
BOOLEAN, INTEGER, TEXT = Atom("BOOLEAN"), Atom("Int"), Atom("STRING")
NUMERAL = Atom("numeral")
"""A number written out, before it is known whether it is a number or a "none" beside the members of a constant set."""
ANYTHING = Atom("anything")
"""The members of {}."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One term."""

    type: Atom
    term: z3.ExprRef


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple, part by part."""

    items: "tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Set:
    """A set by its membership predicate."""

    member: Type
    has: "Callable[[Value], z3.BoolRef]"


@dataclass(frozen=True, slots=True)
class Function:
    """A function by its domain and what it gives there."""

    domain: Set
    at: "Callable[[Value], Value]"


Value = Scalar | Tuple | Set | Function


class Mismatch(Exception):
    """Two values of which one cannot say whether they are equal, because they are of different kinds."""


def kind(value: Value) -> str:
    """What a value is, in words."""
    match value:
        case Scalar():
            return f"an element of {value.type}"
        case Tuple():
            return f"a tuple of {len(value.items)}"
        case Set():
            return f"a set of {value.member}"
        case Function():
            return f"a function on {value.domain.member}"


def joined_atoms(a: Atom, b: Atom) -> Atom:
    """The type of what may be either of two terms.

    Raises:
        Mismatch: there is none.
    """
    if a == b or b == ANYTHING:
        return a
    if a == ANYTHING:
        return b
    if NUMERAL in (a, b):
        other = b if a == NUMERAL else a
        if other not in (BOOLEAN, TEXT):
            return other
    raise Mismatch(f"{a} beside {b}")


def joined(a: Type, b: Type) -> Type:
    """The type of what may be either.

    Raises:
        Mismatch: there is none.
    """
    if a == b or b == ANYTHING:
        return a
    if a == ANYTHING:
        return b
    match a, b:
        case Atom(), Atom():
            return joined_atoms(a, b)
        case TupleOf(), TupleOf() if len(a.items) == len(b.items):
            return TupleOf(tuple(joined(x, y) for x, y in zip(a.items, b.items, strict=True)))
        case SetOf(), SetOf():
            return SetOf(joined(a.member, b.member))
        case FunctionOf(), FunctionOf():
            return FunctionOf(joined(a.argument, b.argument), joined(a.result, b.result))
    raise Mismatch(f"{a} beside {b}")


def atoms(type: Type) -> Iterator[Atom]:  # noqa: A002  (it is one)
    """The atoms of a type that is flat: an atom, or tuples of them.

    Raises:
        Mismatch: it is a set or a function.
    """
    match type:
        case Atom():
            yield INTEGER if type == NUMERAL else type
        case TupleOf():
            for item in type.items:
                yield from atoms(item)
        case _:
            raise Mismatch(f"{type} where only elements and tuples of them can be")


def flat(value: Value) -> Iterator[z3.ExprRef]:
    """The terms of a value of a flat type."""
    match value:
        case Scalar():
            yield value.term
        case Tuple():
            for item in value.items:
                yield from flat(item)
        case _:
            raise Mismatch(f"{kind(value)} where only elements and tuples of them can be")


def unflat(type: Type, terms: Iterator[z3.ExprRef]) -> Value:  # noqa: A002
    """The value of a flat type that has these terms."""
    match type:
        case Atom():
            return Scalar(INTEGER if type == NUMERAL else type, next(terms))
        case TupleOf():
            return Tuple(tuple(unflat(item, terms) for item in type.items))
    raise Mismatch(f"{type} where only elements and tuples of them can be")
