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

MODES = ("kvledger", "kvledger-direct", "kvledger-sync", "kvledger-decode")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_scenario_breaks_nothing(mode, scenario):
    try:
        violation = replay(find(mode), scenario.shape, scenario.script)
    except Impossible as error:
        pytest.skip(str(error))
    assert violation is None, violation.story


@pytest.mark.parametrize("mode", [m for m in MODES if m != "kvledger-sync"])
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.shape.depth == 1], ids=lambda s: s.name)
def test_scenario_breaks_nothing_with_two_steps_in_flight(mode, scenario):
    try:
        violation = replay(find(mode), dataclasses.replace(scenario.shape, depth=2), scenario.script)
    except Impossible as error:
        pytest.skip(str(error))
    assert violation is None, violation.story


@pytest.mark.parametrize("mode", ["kvledger", "kvledger-direct"])
@pytest.mark.parametrize("name", machines.MACHINES)
def test_machine_finds_nothing(mode, name):
    run(mode, name)


@pytest.mark.parametrize("mode", ["kvledger", "kvledger-direct"])
@pytest.mark.parametrize("name", machines.MACHINES)
def test_machine_finds_nothing_with_two_steps_in_flight(mode, name):
    run(mode, name, depth=2)


@pytest.mark.parametrize("name", ["stores", "everything"])
def test_machine_finds_nothing_in_saved_decode_blocks_with_two_steps_in_flight(name):
    run("kvledger-decode", name, depth=2)


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


@pytest.mark.parametrize("name", ["loads", "late", "everything"])
def test_machine_finds_nothing_with_synchronous_loads(name):
    run("kvledger-sync", name)


def run(mode: str, name: str, depth: int = 1) -> None:
    machine = machines.machine_for(name, find(mode), shapes=machines.shapes_of(depth))
    violation = machines.run_machine(machine, "dev", max_examples=8)
    assert violation is None, violation.story
    assert machine.tally.runs >= 8
    assert sum(machine.tally.actions.values()) >= 60


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
