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
    for scenario in SCENARIOS:
        shape = dataclasses.replace(scenario.shape, depth=max(depth, scenario.shape.depth))
        _run_scenario(target, dataclasses.replace(scenario, shape=shape), result, say)
    machines_begin = time.monotonic()
    for number, name in enumerate(chosen):
        left = None
        if seconds is not None:
            left = (seconds - (time.monotonic() - machines_begin)) / (len(chosen) - number)
        _run_machine(target, name, profile, reuse_ids, depth, left, result, say)
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def _run_scenario(target: targets.Target, scenario: Scenario, result: Result, say: Say) -> None:
    try:
        violation = replay(target, scenario.shape, scenario.script, past=scenario.past)
    except Impossible as error:
        say(f"scenario  {scenario.name}: does not apply ({error})")
        return
    result.scenarios.append(
        {
            "name": scenario.name,
            "source": scenario.source,
            "looks_for": scenario.breaks,
            "broke": None if violation is None else violation.name,
        }
    )
    say(f"scenario  {scenario.name}: {'holds' if violation is None else violation}")
    if violation is not None:
        result.findings.append(
            _finding(target, violation, f"scenario: {scenario.name}", scenario.source, scenario.past, SCENARIO_SHRINK_S)
        )


def _run_machine(
    target: targets.Target,
    name: str,
    profile: str,
    reuse_ids: str,
    depth: int,
    seconds: float | None,
    result: Result,
    say: Say,
) -> None:
    past: frozenset[str] = frozenset()
    deadline = None if seconds is None else time.monotonic() + seconds
    for _ in range(FINDINGS_PER_MACHINE):
        machine = machines.machine_for(name, target, past=past, shapes=machines.shapes_of(depth), reuse_ids=reuse_ids)
        begin = time.monotonic()
        violation = machines.run_machine(machine, profile, deadline=deadline)
        took = time.monotonic() - begin
        result.machines.append(
            {
                "machine": name,
                "past": sorted(past),
                "runs": machine.tally.runs,
                "actions": sum(machine.tally.actions.values()),
                "by_action": dict(sorted(machine.tally.actions.items())),
                "refused": sum(machine.tally.impossible.values()),
                "seen": dict(machine.tally.seen),
                "seconds": round(took, 1),
                "broke": None if violation is None else violation.name,
            }
        )
        say(
            f"machine   {name}: {machine.tally.runs} runs, {sum(machine.tally.actions.values())} actions, "
            f"{took:.1f} s: {'holds' if violation is None else violation}"
        )
        if violation is None:
            return
        result.findings.append(_finding(target, violation, f"machine: {name}", "", past))
        if violation.name == "engine-alive":
            return  # an engine that died has nothing behind it
        past |= {violation.name}


def _finding(
    target: targets.Target,
    violation: Violation,
    found_by: str,
    source: str,
    past: frozenset[str],
    budget_s: float = SHRINK_S,
) -> Finding:
    script, found = violation.script, violation
    try:
        script, found = shrinking.shrink(
            target, violation.shape, violation.script, violation.name, past=past, budget_s=budget_s
        )
    except ValueError as error:
        found.story += f"\n  ({error})"
    return Finding(
        property=violation.name,
        found_by=found_by,
        source=source,
        what=found.what,
        story=found.story,
        script=script,
        shape=dataclasses.asdict(violation.shape),
        past=sorted(past),
    )
