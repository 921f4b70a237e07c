"""The actions of a next-state relation, and whether each says what every variable becomes."""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.proof.syntax import Apply, Binder, Expr, Module, Refused

AND = {"$ConjList", "\\land"}
OR = {"$DisjList", "\\lor"}


@dataclass(frozen=True, slots=True)
class Action:
    """One disjunct of Next, with the names that are bound around it."""

    name: str
    binders: tuple[Binder, ...]
    body: Expr


def _name(expr: Expr) -> str:
    """The names of the operators that an action applies: `Refuse/Finish`."""
    match expr:
        case Apply(kind="defined", name=name):
            return name
        case Apply(name=name, args=args) if name in AND | OR:
            return "/".join(filter(None, map(_name, args)))
    return ""


def split(expr: Expr, binders: tuple[Binder, ...] = ()) -> Iterator[Action]:
    """The disjuncts of a next-state relation; the bounded existentials around them are kept."""
    match expr:
        case Apply(name=name, args=args) if name in OR:
            for arg in args:
                yield from split(arg, binders)
        case Apply(name="$BoundedExists", args=(body,)):
            yield from split(body, (*binders, *expr.binders))
        case _:
            yield Action(_name(expr) or f"line {expr.place.line}", binders, expr)


class _Given:
    """Which variables an action or an initial predicate gives a value to, on each of its branches."""

    def __init__(self, module: Module, primed: bool) -> None:
        self.module = module
        self.primed = primed

    def of(self, expr: Expr) -> set[str]:
        match expr:
            case Apply(kind="defined"):
                return self.of(self.module.definitions[expr.key].body)
            case Apply(name=name, args=args) if name in AND:
                return set().union(*map(self.of, args))
            case Apply(name=name, args=args) if name in OR:
                return set.intersection(*map(self.of, args))
            case Apply(name="$BoundedExists", args=(body,)):
                return self.of(body)
            case Apply(name="$IfThenElse", args=(_, yes, no)):
                return self.of(yes) & self.of(no)
            case Apply(name="=" | "\\in", args=(left, _)):
                return self._left(left)
            case Apply(name="UNCHANGED", args=(kept,)) if self.primed:
                return self._kept(kept)
        return set()

    def _left(self, expr: Expr) -> set[str]:
        match expr:
            case Apply(name="'", args=(Apply(kind="variable", name=name),)) if self.primed:
                return {name}
            case Apply(kind="variable", name=name) if not self.primed:
                return {name}
        return set()

    def _kept(self, expr: Expr) -> set[str]:
        match expr:
            case Apply(kind="variable", name=name):
                return {name}
            case Apply(kind="defined", args=()):
                return self._kept(self.module.definitions[expr.key].body)
            case Apply(name="$Tuple", args=args):
                return set().union(*map(self._kept, args))
        return set()


def complete(module: Module, what: str, expr: Expr, primed: bool) -> None:
    """That every branch says what each variable is: `x = …`, `x \\in …` or UNCHANGED, with a prime in an action.

    In TLA+ a variable of which nothing is said may become anything, of any type; formulas with types would miss that.

    Raises:
        Refused: a variable is left out.
    """
    given = _Given(module, primed).of(expr)
    for name in module.variables:
        if name not in given:
            shown = name + "'" * primed
            raise Refused(
                expr.place,
                f"{what} leaves open what {shown} is: every branch wants {shown} = …, {shown} \\in … or UNCHANGED",
            )
