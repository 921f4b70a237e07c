"""Cardinalities of sets of unknown size: a number per set, and rules that are theorems about finite sets.

A set is counted as a function of the names bound around it, beside its membership predicate. The rules speak of one set; of
two (equal, or they differ somewhere; if there only, by one); and of three (one falls into two others). Witnesses ("somewhere")
are Skolem functions.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import z3


def key(member: z3.ExprRef, holds: z3.BoolRef, arguments: Sequence[z3.ExprRef]) -> str:
    """The same for two sets that differ in the names of their arguments only."""
    places = [(name, z3.Var(i, name.sort())) for i, name in enumerate((member, *arguments))]
    sorts = [str(name.sort()) for name in (member, *arguments)]
    return f"{sorts} {z3.substitute(holds, *places).sexpr()}"


@dataclass(frozen=True, slots=True)
class Count:
    """A counted set: of the `member` for which `holds`, as a function of `arguments`."""

    id: int
    member: z3.ExprRef
    holds: z3.BoolRef
    arguments: tuple[z3.ExprRef, ...]

    @property
    def signature(self) -> list[str]:
        """What two sets must have in common to be compared."""
        return [str(name.sort()) for name in (self.member, *self.arguments)]

    def number(self, arguments: Sequence[z3.ExprRef]) -> z3.ArithRef:
        sorts = [x.sort() for x in arguments]
        number: z3.ArithRef = z3.Function(f"count {self.id}", *sorts, z3.IntSort())(*arguments)
        return number

    def has(self, arguments: Sequence[z3.ExprRef], member: z3.ExprRef) -> z3.BoolRef:
        sorts = [x.sort() for x in (*arguments, member)]
        has: z3.BoolRef = z3.Function(f"counted {self.id}", *sorts, z3.BoolSort())(*arguments, member)
        return has

    def witness(self, name: str, arguments: Sequence[z3.ExprRef]) -> z3.ExprRef:
        sorts = [x.sort() for x in arguments]
        return z3.Function(f"{name} {self.id}", *sorts, self.member.sort())(*arguments)


def _closed(bound: Sequence[z3.ExprRef], body: z3.BoolRef, patterns: Sequence[z3.ExprRef]) -> z3.BoolRef:
    return z3.ForAll(list(bound), body, patterns=list(patterns)) if bound else body


def of_one(a: Count) -> Iterable[z3.BoolRef]:
    """A set has its members; it is empty, or has a member; its number is no less than 0, and 1 if it has a member."""
    at, x = a.arguments, a.member
    number, has, some = a.number(at), a.has(at, x), a.witness("some", at)
    yield z3.ForAll([*at, x], has == a.holds, patterns=[has])
    yield z3.ForAll([*at, x], z3.Implies(a.holds, has))
    yield z3.ForAll([*at, x], z3.Implies(has, number >= 1), patterns=[has])
    yield _closed(at, z3.And(number >= 0, z3.Or(number == 0, a.has(at, some))), [number] if at else [])


def of_two(a: Count, b: Count) -> Iterable[z3.BoolRef]:
    """Two sets: as many, or they differ at a point; one more, if they differ there only; a subset has no more."""
    at, x = a.arguments, a.member
    m, n = a.number(at), b.number(at)
    one, two, out, back = (a.witness(f"{name} {b.id}", at) for name in ("differ", "also", "only", "lacks"))
    more = z3.And(one != two, a.has(at, two) != b.has(at, two))
    rules = z3.And(
        z3.Or(m == n, a.has(at, one) != b.has(at, one)),
        z3.Implies(z3.And(a.has(at, one), z3.Not(b.has(at, one))), z3.Or(m == n + 1, more)),
        z3.Implies(z3.And(b.has(at, one), z3.Not(a.has(at, one))), z3.Or(n == m + 1, more)),
        z3.Or(m <= n, z3.And(a.has(at, out), z3.Not(b.has(at, out)))),
        z3.Or(n <= m, z3.And(b.has(at, back), z3.Not(a.has(at, back)))),
    )
    yield _closed(at, rules, [z3.MultiPattern(m, n)] if at else [])
    differs = z3.And(a.has(at, one) != b.has(at, one), z3.Or(x == one, more))
    patterns = [z3.MultiPattern(a.has(at, x), n), z3.MultiPattern(b.has(at, x), m)] if at else []
    yield _closed([*at, x], z3.Implies(a.has(at, x) != b.has(at, x), differs), patterns)


def of_three(whole: Count, a: Count, b: Count) -> Iterable[z3.BoolRef]:
    """A set that falls into two others has as many members as they have together."""
    at = whole.arguments
    split = whole.witness(f"split {a.id} {b.id}", at)
    w, p, q = (c.has(at, split) for c in (whole, a, b))
    apart = z3.Or(w != z3.Or(p, q), z3.And(p, q))
    rule = z3.Or(whole.number(at) == a.number(at) + b.number(at), apart)
    yield _closed(at, rule, [z3.MultiPattern(whole.number(at), a.number(at), b.number(at))] if at else [])


def _renamed(count: Count, model: Count) -> Count:
    """The same count, written with the names of another one of its signature."""
    names = list(zip((count.member, *count.arguments), (model.member, *model.arguments), strict=True))
    return Count(count.id, model.member, z3.substitute(count.holds, *names), model.arguments)


def rules(counts: Sequence[Count]) -> list[z3.BoolRef]:
    """All rules for these counts."""
    found = [rule for count in counts for rule in of_one(count)]
    for pair in itertools.combinations(counts, 2):
        if pair[0].signature == pair[1].signature:
            found += of_two(pair[0], _renamed(pair[1], pair[0]))
    for whole, *parts in itertools.permutations(counts, 3):
        if parts[0].id < parts[1].id and whole.signature == parts[0].signature == parts[1].signature:
            found += of_three(whole, *(_renamed(part, whole) for part in parts))
    return found
