"""kvledger under the suite, CI profile: scenarios and machines on every mode, contract and refinement level."""

import dataclasses

import pytest

from conformance.refinement.targets import find
from kvledger.errors import ConfigError
from kvledger_conformance.engine import compat
from kvledger_conformance.suite import machines
from kvledger_conformance.suite.driver import driving, replay
from kvledger_conformance.suite.properties import CONTRACT, PROPERTIES, Impossible
from kvledger_conformance.suite.scenarios import SCENARIOS

DEPTHS = {"kvledger": (1, 2), "kvledger-direct": (1, 2), "kvledger-decode": (1, 2), "kvledger-sync": (1,)}
"""Steps in flight, by mode."""
SCENARIO_RUNS = [
    pytest.param(mode, depth, scenario, id=f"{scenario.name}-{mode}-{depth}")
    for mode, depths in DEPTHS.items()
    for depth in depths
    for scenario in SCENARIOS
    if depth == 1 or scenario.shape.depth == 1  # a scenario of two steps runs as it is
]
MACHINE_RUNS = [
    *(
        (mode, name, depth)
        for mode in ("kvledger", "kvledger-direct")
        for name in machines.MACHINES
        for depth in (1, 2)
    ),
    *(("kvledger-decode", name, 2) for name in ("stores", "everything")),
    *(("kvledger-sync", name, 1) for name in ("loads", "late", "everything")),
]


@pytest.mark.parametrize(("mode", "depth", "scenario"), SCENARIO_RUNS)
def test_scenario_breaks_nothing(mode, depth, scenario):
    shape = dataclasses.replace(scenario.shape, depth=max(depth, scenario.shape.depth))
    try:
        violation = replay(find(mode), shape, scenario.script)
    except Impossible as error:
        pytest.skip(str(error))
    assert violation is None, violation.story


@pytest.mark.parametrize(("mode", "name", "depth"), MACHINE_RUNS)
def test_machine_finds_nothing(mode, name, depth):
    machine = machines.machine_for(name, find(mode), shapes=machines.shapes_of(depth))
    violation = machines.run_machine(machine, "dev", max_examples=8)
    assert violation is None, violation.story
    assert machine.tally.runs >= 8
    assert sum(machine.tally.actions.values()) >= 60


def test_synchronous_loads_are_refused_with_two_steps_in_flight():
    """vLLM would deliver tokens computed on what a failed one did not bring (docs/found.md, K3)."""
    with (
        pytest.raises(Impossible) as refused,
        driving(find("kvledger-sync"), compat.Shape(depth=2)),
    ):
        pass
    assert isinstance(refused.value.__cause__, ConfigError)
    assert refused.value.__cause__.field == "load_async"
    with driving(find("kvledger-sync"), compat.Shape(depth=2, role="kv_producer")) as driver:
        assert driver.engine.core is not None  # a producer does not load then, so nothing is wrong with it


def test_machines_reach_what_they_are_for():
    """A run in which nothing happens proves nothing."""
    seen: set[str] = set()
    for name in ("stores", "loads", "late"):
        machine = machines.machine_for(name, find("kvledger-direct"))
        assert machines.run_machine(machine, "ci", max_examples=12) is None
        seen |= set(machine.tally.seen)
    assert {"preemption", "load", "id reused", "store"} <= seen


def test_two_steps_in_flight_are_what_they_claim():
    """A request's block is written after core has given it back: the danger that depth brings is really there."""
    machine = machines.machine_for("stores", find("kvledger"), shapes=machines.TWO_STEPS[-1:])
    assert machines.run_machine(machine, "ci", max_examples=10) is None
    assert {"written after it was freed", "preemption", "store"} <= set(machine.tally.seen)


def test_scenarios_name_properties_that_exist():
    assert {s.breaks for s in SCENARIOS} <= set(PROPERTIES)
    assert len(CONTRACT) == len(PROPERTIES) - 1
