"""What a mutation run says: which mutants lived although no entry of survivors.toml explains them, and which entries are stale.

A mutant is known by its function and by the lines it changes, not by a line number or mutmut's running number: entries
outlive edits elsewhere, and no longer fit when the line itself changes.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KILLED = frozenset({"killed", "timeout"})


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: in `function`, the lines `was` became `now` (stripped, one a line)."""

    function: str
    was: str
    now: str


@dataclass(frozen=True)
class Verdict:
    """`statuses` counts mutants by mutmut's word for how they ended."""

    statuses: dict[str, int]
    explained: int
    unexplained: list[Mutant]
    stale: list[Mutant]

    @property
    def holds(self) -> bool:
        """Whether every mutant is killed or explained, and every explanation is needed."""
        return not self.unexplained and not self.stale


class BadEntry(ValueError):
    """An entry of survivors.toml that explains nothing."""


def mutant_of(function: str, diff: str) -> Mutant:
    """The mutant that a unified diff describes."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    sides = {sign: "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"}
    return Mutant(function, sides["-"], sides["+"])


def read_survivors(file: Path) -> Counter[Mutant]:
    """The explained survivors; `times` (default 1) says how often the same change occurs in the function.

    Raises:
        BadEntry: an entry without a reason, or one that is there twice.
    """
    found: Counter[Mutant] = Counter()
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", []):
        mutant = Mutant(entry["function"], entry["was"].strip(), entry["now"].strip())
        if not entry.get("reason", "").strip():
            raise BadEntry(f"survivor in {mutant.function} ({mutant.now!r}) has no reason: say why no test can tell it")
        if mutant in found:
            raise BadEntry(f"survivor in {mutant.function} ({mutant.now!r}) is there twice: use times = 2")
        found[mutant] = entry.get("times", 1)
    return found


def judge(ended: list[tuple[Mutant, str]], explained: Counter[Mutant], *, complete: bool = True) -> Verdict:
    """Compare how the mutants ended with the explained survivors. Of a run of some functions (not `complete`), entries
    for others are not stale.
    """
    lived = Counter(mutant for mutant, status in ended if status not in KILLED)
    functions = {mutant.function for mutant, _ in ended}
    stale = [m for m in (explained - lived).elements() if complete or m.function in functions]
    return Verdict(
        statuses=dict(Counter(status for _, status in ended).most_common()),
        explained=(lived & explained).total(),
        unexplained=sorted((lived - explained).elements()),
        stale=sorted(stale),
    )
