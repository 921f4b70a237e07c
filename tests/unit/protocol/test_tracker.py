"""One generation's tracker: the life of its load, whether its bytes are known to be right, what is due again."""

import itertools

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import LOAD_LIFE, Load, Tracker

LOAD_STEPS = {
    "EmitLoad": {"none": "pending", "failed": "pending"},
    "Loaded": {"pending": "loaded", "tainted": "tainted"},
    "LoadFailed": {"pending": "failed", "tainted": "tainted"},
    "Taint": dict.fromkeys(("none", "pending", "loaded", "failed", "tainted"), "tainted"),
}
"""`LOAD_LIFE`, written down once more from docs/protocol.md."""


@pytest.mark.parametrize(("old", "action"), list(itertools.product(Load, [*LOAD_STEPS, "Other"])))
def test_a_load_moves_by_the_table_or_not_at_all(old, action):
    tracker = Tracker(7, load=old)
    expected = LOAD_STEPS.get(action, {}).get(old.value)
    if expected is None:
        with pytest.raises(ProtocolError) as refusal:
            tracker.move_load(action)
        assert str(refusal.value) == f"the load of generation 7 is {old.value} (action {action})"
    else:
        tracker.move_load(action)
    assert tracker.load.value == (expected or old.value)


def test_no_action_moves_a_load_but_those_of_the_table():
    assert {action for _, action in LOAD_LIFE} == set(LOAD_STEPS)


@pytest.mark.parametrize("load", Load)
@pytest.mark.parametrize("waits_for", [set(), {3}])
def test_bytes_are_known_to_be_right_unless_a_load_is_out_or_failed_under_them(load, waits_for):
    tracker = Tracker(1, load=load, waits_for=waits_for)
    assert tracker.may_store == (load not in (Load.PENDING, Load.TAINTED) and not waits_for)


def test_a_fresh_tracker_has_issued_nothing_and_loads_nothing():
    tracker = Tracker(1)
    assert (tracker.frontier, tracker.retry, tracker.attempts, tracker.waits_for) == (0, {}, {}, set())
    assert (tracker.load, tracker.load_job) == (Load.NONE, None)


def test_retries_are_due_from_their_time_on_lowest_index_first():
    tracker = Tracker(1, retry={5: 1.0, 2: 2.0, 3: 2.1})
    assert tracker.due(2.0) == [2, 5]
