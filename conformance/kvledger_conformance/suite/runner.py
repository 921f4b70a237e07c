"""One run on one target: scenarios, then state machines; every violation shrunk, told and kept."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvledger_conformance.engine import compat
from kvledger_conformance.suite import machines, shrinking, targets
from kvledger_conformance.suite.driver import Script, replay
from kvledger_conformance.suite.properties import Impossible, Violation
from kvledger_conformance.suite.scenarios import SCENARIOS, Scenario

FINDINGS_PER_MACHINE = 4
SHRINK_S = 15.0
SCENARIO_SHRINK_S = 6.0
"""Scenarios are short already."""


@dataclass
class Finding:
    """A broken property: where it was found, and the shortest script known to break it."""

    property: str
    found_by: str
    source: str
    what: str
    story: str
    script: Script
    shape: dict[str, Any]
    past: list[str] = field(default_factory=list)


@dataclass
class Result:
    """Everything that one run did."""

    target: str
    vllm: str
    profile: str
    scenarios: list[dict[str, Any]] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def broken(self) -> set[str]:
        """Names of the broken properties."""
        return {f.property for f in self.findings}


Say = Callable[[str], None]


def run(
    target: targets.Target,
    profile: str,
    *,
    say: Say = lambda _line: None,
    chosen: tuple[str, ...] = tuple(machines.MACHINES),
    reuse_ids: str = "at once",
    seconds: float | None = None,
    depth: int = 1,
) -> Result:
    """Scenarios and the chosen machines against one target. `seconds` bounds the machines together; `depth`: steps in
    flight, for the machines and for scenarios that do not ask for more."""
    begin = time.monotonic()
    name = target.name if depth == 1 else f"{target.name}, {depth} steps in flight"
    result = Result(name, compat.VLLM_VERSION, profile)
    of_one = _Run(target, profile, reuse_ids, depth, result, say)
    for scenario in SCENARIOS:
        shape = dataclasses.replace(scenario.shape, depth=max(depth, scenario.shape.depth))
        of_one.scenario(dataclasses.replace(scenario, shape=shape))
    machines_begin = time.monotonic()
    for number, name in enumerate(chosen):
        left = None
        if seconds is not None:
            left = (seconds - (time.monotonic() - machines_begin)) / (len(chosen) - number)
        of_one.machine(name, left)
    result.seconds = round(time.monotonic() - begin, 1)
    return result


@dataclass(frozen=True)
class _Run:
    target: targets.Target
    profile: str
    reuse_ids: str
    depth: int
    result: Result
    say: Say

    def scenario(self, scenario: Scenario) -> None:
        try:
            violation = replay(self.target, scenario.shape, scenario.script, past=scenario.past)
        except Impossible as error:
            self.say(f"scenario  {scenario.name}: does not apply ({error})")
            return
        facts = {"name": scenario.name, "source": scenario.source, "looks_for": scenario.breaks}
        self.result.scenarios.append(facts | {"broke": None if violation is None else violation.name})
        self.say(f"scenario  {scenario.name}: {'holds' if violation is None else violation}")
        if violation is not None:
            self._keep(violation, f"scenario: {scenario.name}", scenario.source, scenario.past, SCENARIO_SHRINK_S)

    def machine(self, name: str, seconds: float | None) -> None:
        past: frozenset[str] = frozenset()
        shapes = machines.shapes_of(self.depth)
        deadline = None if seconds is None else time.monotonic() + seconds
        for _ in range(FINDINGS_PER_MACHINE):
            machine = machines.machine_for(name, self.target, past=past, shapes=shapes, reuse_ids=self.reuse_ids)
            begin = time.monotonic()
            violation = machines.run_machine(machine, self.profile, deadline=deadline)
            took, tally = time.monotonic() - begin, machine.tally
            self.result.machines.append(
                {
                    "machine": name,
                    "past": sorted(past),
                    "runs": tally.runs,
                    "actions": tally.actions.total(),
                    "by_action": dict(sorted(tally.actions.items())),
                    "refused": tally.impossible.total(),
                    "seen": dict(tally.seen),
                    "seconds": round(took, 1),
                    "broke": None if violation is None else violation.name,
                }
            )
            effort = f"{tally.runs} runs, {tally.actions.total()} actions, {took:.1f} s"
            self.say(f"machine   {name}: {effort}: {'holds' if violation is None else violation}")
            if violation is None:
                return
            self._keep(violation, f"machine: {name}", "", past)
            if violation.name == "engine-alive":
                return  # an engine that died has nothing behind it
            past |= {violation.name}

    def _keep(
        self, violation: Violation, found_by: str, source: str, past: frozenset[str], budget_s: float = SHRINK_S
    ) -> None:
        """Note a finding, with the shortest script that leads there."""
        script, found, shape = violation.script, violation, violation.shape
        try:
            script, found = shrinking.shrink(self.target, shape, script, violation.name, past=past, budget_s=budget_s)
        except ValueError as error:
            found.story += f"\n  ({error})"
        where, how = (found_by, source), (dataclasses.asdict(shape), sorted(past))
        self.result.findings.append(Finding(violation.name, *where, found.what, found.story, script, *how))
