"""kvledger under the suite, CI profile: scenarios and machines on every mode, contract and refinement level."""

import pytest
from kvledger_conformance import machines, targets
from kvledger_conformance.driver import replay
from kvledger_conformance.properties import CONTRACT, PROPERTIES, Impossible
from kvledger_conformance.scenarios import SCENARIOS

MODES = ("kvledger", "kvledger-direct", "kvledger-sync", "kvledger-decode")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_scenario_breaks_nothing(mode, scenario):
    target = targets.find(mode).with_options(**dict(scenario.options))
    try:
        violation = replay(target, scenario.shape, scenario.script)
    except Impossible as error:
        pytest.skip(str(error))
    assert violation is None, violation.story


@pytest.mark.parametrize("mode", ["kvledger", "kvledger-direct"])
@pytest.mark.parametrize("name", machines.MACHINES)
def test_machine_finds_nothing(mode, name):
    run(mode, name)


@pytest.mark.parametrize("name", ["loads", "late", "everything"])
def test_machine_finds_nothing_with_synchronous_loads(name):
    run("kvledger-sync", name)


def run(mode: str, name: str) -> None:
    machine = machines.machine_for(name, targets.find(mode))
    violation = machines.run_machine(machine, "dev", max_examples=8)
    assert violation is None, violation.story
    assert machine.tally.runs >= 8
    assert sum(machine.tally.actions.values()) >= 60


def test_machines_reach_what_they_are_for():
    """A run in which nothing happens proves nothing."""
    seen: set[str] = set()
    for name in ("stores", "loads", "late"):
        machine = machines.machine_for(name, targets.find("kvledger-direct"))
        assert machines.run_machine(machine, "ci", max_examples=20) is None
        seen |= set(machine.tally.seen)
    assert {"preemption", "load", "id reused", "store"} <= seen


def test_scenarios_name_properties_that_exist():
    assert {s.breaks for s in SCENARIOS} <= set(PROPERTIES)
    assert len(CONTRACT) == len(PROPERTIES) - 1
