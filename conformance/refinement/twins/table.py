"""Each historic bug as a patch on kvledger: the suite must kill every one, and says by which layer.

A twin has the id of the model's mutant that stands for the same bug (`spec/mutants/registry.toml`). It is killed by
the first scenario or machine that breaks a property on it; the unpatched connector breaks none, which is checked too.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from conformance.refinement import predicates
from conformance.refinement.twins.patches import PATCHES, TOLD
from kvledger_conformance.suite import machines, targets
from kvledger_conformance.suite.driver import replay
from kvledger_conformance.suite.properties import Impossible, Violation
from kvledger_conformance.suite.scenarios import SCENARIOS


@dataclass(frozen=True, slots=True)
class Twin:
    """As `twins.toml` tells it. `mutant`: the model's mutants it is the twin of. `first`: the scenario tried first."""

    id: str
    mutant: list[str]
    target: str
    first: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def patch(self) -> Callable[[], AbstractContextManager[Any]]:
        """Puts the bug in."""
        return PATCHES[self.id]

    @property
    def mechanism(self) -> str:
        """What the bug does."""
        return (self.patch.__doc__ or "").strip()


TWINS = tuple(Twin(id=name, **{"mutant": [name], **told}) for name, told in TOLD["twin"].items())
BY_TOUR: dict[str, str] = TOLD["by_tour"]
"""By mutant: the slice whose tour or refusal sweep must kill its twin at the level of the ledgers (`in_adapter`)."""
NOT_TWINNED: dict[str, str] = TOLD["not_twinned"]
"""Mutants of the model without a twin, and why."""


def run_all(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Try to kill every twin. One row each: id, mutants, killed, by (layer and place), property, steps."""
    rows = []
    for twin in TWINS:
        rows.append(row := kill(twin))
        verdict = f"killed by {row['by']}: {row['property']}" if row["killed"] else "SURVIVES"
        say(f"twin  {twin.id:30} {verdict}")
    return rows


def kill(twin: Twin) -> dict[str, Any]:
    """Run the layers in order until one breaks a property."""
    target = targets.find(twin.target).with_options(**twin.options)
    row = {"id": twin.id, "mutants": twin.mutant, "mechanism": twin.mechanism}
    # what a contract-level suite sees counts first; the look inside only if nothing else does
    for level, chosen in (
        ("contract", dataclasses.replace(target, refine=None)),
        ("refinement", dataclasses.replace(target, refine=predicates.check)),
    ):
        for by, violation in _attempts(twin, chosen, machines_too=level == "refinement"):
            if violation is not None:
                where = f"{by} ({level})" if violation.name == "refines-the-model" else by
                what = {"property": violation.name, "what": violation.what, "steps": len(violation.script)}
                return row | {"killed": True, "by": where} | what
    return row | {"killed": False, "by": "", "property": "", "what": "", "steps": 0}


def _attempts(twin: Twin, target: targets.Target, *, machines_too: bool) -> Iterator[tuple[str, Violation | None]]:
    for scenario in sorted(SCENARIOS, key=lambda s: s.name != twin.first):
        with twin.patch(), contextlib.suppress(Impossible):
            yield f"scenario: {scenario.name}", replay(target, scenario.shape, scenario.script)
    if machines_too:
        for name in machines.MACHINES:
            with twin.patch():
                yield f"machine: {name}", machines.run_machine(machines.machine_for(name, target), "dev")
