"""The two worlds that formulas are read in: sets of any size, and sets of exactly n members.

In the first, quantifiers are the solver's and a cardinality is an unknown number that obeys the rules of `counting`. In the
second, quantifiers are written out and cardinalities counted: no rule is needed, an answer is final, and a model is a state.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import z3

from conformance.proof import counting
from conformance.proof.values import BOOLEAN, INTEGER, TEXT, Atom, Mismatch


@dataclass(frozen=True, slots=True)
class Names:
    """What a module's formulas can name: its constant sets, the string literals, and the numerals that may stand for "none"."""

    sets: tuple[str, ...]
    texts: tuple[str, ...]
    finite: frozenset[str]
    """Constant sets that are assumed to be finite."""
    numerals: tuple[tuple[str, int], ...]
    """(set, number): assumed not to be a member."""


class World(abc.ABC):
    """Sorts, literals, quantifiers and cardinalities."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.rules: list[z3.BoolRef] = []
        self._fresh = itertools.count()

    def sort(self, atom: Atom) -> z3.SortRef:
        if atom == BOOLEAN:
            return z3.BoolSort()
        if atom == INTEGER:
            return z3.IntSort()
        return self._sort(atom.name)

    def fresh(self, hint: str) -> str:
        """A name that nothing else has."""
        return f"{hint}!{next(self._fresh)}"

    def numeral(self, atom: Atom, number: int) -> z3.ExprRef:
        """The element that a numeral stands for beside the members of a constant set."""
        if (atom.name, number) not in self.names.numerals:
            raise Mismatch(
                f"{number} beside elements of {atom}, and no ASSUME {number} \\notin {atom} at the top of a conjunction"
            )
        return self._numeral(atom.name, number)

    @abc.abstractmethod
    def _sort(self, name: str) -> z3.SortRef: ...

    @abc.abstractmethod
    def _numeral(self, name: str, number: int) -> z3.ExprRef: ...

    @abc.abstractmethod
    def text(self, literal: str) -> z3.ExprRef: ...

    @abc.abstractmethod
    def member(self, name: str, term: z3.ExprRef) -> z3.BoolRef:
        """Whether a term is a member of a constant set."""

    @abc.abstractmethod
    def forall(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef: ...

    @abc.abstractmethod
    def exists(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef: ...

    @abc.abstractmethod
    def count(self, member: z3.ExprRef, holds: z3.BoolRef, around: Sequence[z3.ExprRef]) -> z3.ArithRef:
        """How many `member` there are for which `holds`; `around`: the bound names that this may depend on."""


def occurs(term: z3.ExprRef, names: Iterable[z3.ExprRef]) -> list[z3.ExprRef]:
    """Those of the names that occur in a term."""
    wanted = {name.get_id(): name for name in names}
    found: set[int] = set()
    seen: set[int] = set()
    stack = [term]
    while stack:
        top = stack.pop()
        if top.get_id() in seen:
            continue
        seen.add(top.get_id())
        if top.get_id() in wanted:
            found.add(top.get_id())
        stack += [top.body()] if z3.is_quantifier(top) else top.children()
    return [name for key, name in wanted.items() if key in found]


@dataclass(slots=True)
class _Counts:
    """The counting functions made so far, by what they count."""

    made: dict[str, counting.Count] = field(default_factory=dict)


class Arbitrary(World):
    """Constant sets of any finite size."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._sorts = {name: z3.DeclareSort(name) for name in (*names.sets, TEXT.name)}
        self._counts = _Counts()

    def _sort(self, name: str) -> z3.SortRef:
        return self._sorts[name]

    def _numeral(self, name: str, number: int) -> z3.ExprRef:
        return z3.Const(f"{name}:{number}", self._sorts[name])

    def text(self, literal: str) -> z3.ExprRef:
        return z3.Const(f"text {literal}", self._sorts[TEXT.name])

    def member(self, name: str, term: z3.ExprRef) -> z3.BoolRef:
        return z3.Function(f"in {name}", self._sorts[name], z3.BoolSort())(term)

    def forall(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef:
        return z3.ForAll(list(bound), body)

    def exists(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef:
        return z3.Exists(list(bound), body)

    def count(self, member: z3.ExprRef, holds: z3.BoolRef, around: Sequence[z3.ExprRef]) -> z3.ArithRef:
        arguments = occurs(holds, around)
        key = counting.key(member, holds, arguments)
        if key not in self._counts.made:
            self._counts.made[key] = counting.Count(len(self._counts.made), member, holds, tuple(arguments))
        return self._counts.made[key].number(arguments)

    def axioms(self) -> list[z3.BoolRef]:
        """What holds in this world: literals differ, and the rules of cardinalities for the sets counted so far."""
        literals = [self.text(x) for x in self.names.texts]
        apart = [z3.Distinct(*literals)] if len(literals) > 1 else []
        for name in self.names.sets:
            none = [self._numeral(name, number) for owner, number in self.names.numerals if owner == name]
            apart += [z3.Distinct(*none)] if len(none) > 1 else []
        return [*apart, *self.rules, *counting.rules(list(self._counts.made.values()))]


@functools.lru_cache(maxsize=256)
def _listed(name: str, labels: tuple[str, ...]) -> tuple[z3.SortRef, tuple[z3.ExprRef, ...]]:
    """An enumerated sort; one object per name and labels, since the solver keeps sorts by name."""
    sort, elements = z3.EnumSort(
        f"{name}/{len(labels)}/{'/'.join(labels)}", [f"{name}/{len(labels)}:{label}" for label in labels]
    )
    return sort, tuple(elements)


def short(name: str) -> str:
    """What a member of a constant set is called: `Blocks` has `block1`, `block2`, …"""
    return (name[:-3] if name.endswith("Ids") else name.rstrip("s")).lower()


class Finite(World):
    """Constant sets of exactly n members."""

    def __init__(self, names: Names, size: int) -> None:
        super().__init__(names)
        self.size = size
        self.elements: dict[str, tuple[z3.ExprRef, ...]] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        self._sorts: dict[str, z3.SortRef] = {}
        for name in names.sets:
            numerals = [str(number) for owner, number in names.numerals if owner == name]
            self._list(name, [*(f"{short(name)}{i + 1}" for i in range(size)), *numerals])
        self._list(TEXT.name, [*(f'"{text}"' for text in names.texts), "another string"])

    def _list(self, name: str, labels: Sequence[str]) -> None:
        self.labels[name] = tuple(labels)
        self._sorts[name], self.elements[name] = _listed(name, tuple(labels))

    def _sort(self, name: str) -> z3.SortRef:
        return self._sorts[name]

    def _numeral(self, name: str, number: int) -> z3.ExprRef:
        return self.elements[name][self.labels[name].index(str(number))]

    def text(self, literal: str) -> z3.ExprRef:
        return self.elements[TEXT.name][self.labels[TEXT.name].index(f'"{literal}"')]

    def member(self, name: str, term: z3.ExprRef) -> z3.BoolRef:
        return z3.Or([term == element for element in self.elements[name][: self.size]])

    def all(self, sort: z3.SortRef) -> Sequence[z3.ExprRef]:
        """Every element of a sort.

        Raises:
            Mismatch: there is no end of them.
        """
        if sort == z3.BoolSort():
            return [z3.BoolVal(False), z3.BoolVal(True)]
        for name, found in self._sorts.items():
            if found == sort:
                return self.elements[name]
        raise Mismatch(f"a name bound to a {sort}: a finite instance cannot list them")

    def _written(
        self, bound: Sequence[z3.ExprRef], body: z3.BoolRef, join: Callable[[list[z3.BoolRef]], z3.BoolRef]
    ) -> z3.BoolRef:
        choices = itertools.product(*(self.all(x.sort()) for x in bound))
        return join([z3.simplify(z3.substitute(body, *zip(bound, choice, strict=True))) for choice in choices])

    def forall(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef:
        return self._written(bound, body, z3.And)

    def exists(self, bound: Sequence[z3.ExprRef], body: z3.BoolRef) -> z3.BoolRef:
        return self._written(bound, body, z3.Or)

    def count(self, member: z3.ExprRef, holds: z3.BoolRef, around: Sequence[z3.ExprRef]) -> z3.ArithRef:  # noqa: ARG002
        there = [z3.substitute(holds, (member, element)) for element in self.all(member.sort())]
        return z3.Sum([z3.If(x, z3.IntVal(1), z3.IntVal(0)) for x in there])
