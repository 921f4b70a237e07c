"""A parsed TLA+ module: expressions with their places, and the refusal of what is not understood."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression begins."""

    module: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.module}.tla line {self.line}, column {self.column}"


NOWHERE = Place("?", 0, 0)


class Refused(Exception):
    """The module has something that is not understood, or understood and not allowed: nothing is guessed."""

    def __init__(self, place: Place, what: str) -> None:
        super().__init__(place, what)
        self.place = place
        self.what = what

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


@dataclass(frozen=True, slots=True)
class Number:
    """A numeral."""

    place: Place
    value: int


@dataclass(frozen=True, slots=True)
class Text:
    """A string literal."""

    place: Place
    value: str


@dataclass(frozen=True, slots=True)
class Old:
    """`@`, the value that EXCEPT replaces."""

    place: Place


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that is refused if it is ever evaluated; a module that is extended may have it and not use it."""

    place: Place
    what: str


@dataclass(frozen=True, slots=True)
class Binder:
    """`x, y \\in S`: the keys of the names and the domain."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    domain: "Expr"


Kind = Literal["variable", "constant", "parameter", "defined", "builtin"]


@dataclass(frozen=True, slots=True)
class Apply:
    """A name or operator with its arguments; `key` tells apart what has the same name."""

    place: Place
    kind: Kind
    name: str
    key: str
    args: tuple["Expr", ...] = ()
    binders: tuple[Binder, ...] = ()


Expr = Number | Text | Old | Unread | Apply


@dataclass(frozen=True, slots=True)
class Definition:
    """An operator of the module: `name(parameters) == body`. The standard modules' operators are built in."""

    name: str
    parameters: tuple[str, ...]
    body: Expr


@dataclass(slots=True)
class Module:
    """What a module declares, defines and assumes. Definitions are found by key; `named` has those of the top level."""

    name: str
    constants: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    definitions: dict[str, Definition] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    assumptions: list[Expr] = field(default_factory=list)

    def body(self, name: str) -> Expr:
        """The body of the operator `name`, which takes no arguments.

        Raises:
            Refused: the module has no such operator.
        """
        key = self.named.get(name)
        if key is None or self.definitions[key].parameters:
            raise Refused(Place(self.name, 1, 1), f"the module defines no {name} without arguments")
        return self.definitions[key].body


def conjuncts(expr: Expr) -> list[Expr]:
    """The conjuncts of a conjunction; names of definitions are not opened."""
    if isinstance(expr, Apply) and expr.name in {"$ConjList", "\\land"}:
        return [part for arg in expr.args for part in conjuncts(arg)]
    return [expr]


def opened(module: Module, expr: Expr) -> Expr:
    """The body behind a name without arguments, or the expression itself."""
    while isinstance(expr, Apply) and expr.kind == "defined" and not expr.args:
        expr = module.definitions[expr.key].body
    return expr
