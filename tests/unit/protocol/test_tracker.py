"""The two tables of lives, written down once more from docs/protocol.md: every step they do not list is refused."""

import itertools

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import LOAD_LIFE, RANK_LIFE, Life, Load, Result, Tracker

RANK_STEPS = {
    "RankStart": {"queued": "running"},
    "RankDrop": {"queued": "reported"},
    "RankFinish": {"running": "reported"},
    "RankQuarantine": {"running": "quarantined"},
    "RankExpire": {"running": "reported", "quarantined": "reported"},
}
LOAD_STEPS = {
    "EmitLoad": {"none": "pending", "failed": "pending"},
    "Loaded": {"pending": "loaded", "tainted": "tainted"},
    "LoadFailed": {"pending": "failed", "tainted": "tainted"},
    "Taint": dict.fromkeys(("none", "pending", "loaded", "failed", "tainted"), "tainted"),
}


def flat(steps: dict[str, dict[str, str]]) -> dict[tuple[str, str], str]:
    return {(old, action): new for action, moves in steps.items() for old, new in moves.items()}


def test_a_jobs_life_on_a_rank():
    assert {(old.value, action): new.value for (old, action), new in RANK_LIFE.items()} == flat(RANK_STEPS)


def test_a_generations_load():
    assert {(old.value, action): new.value for (old, action), new in LOAD_LIFE.items()} == flat(LOAD_STEPS)


@pytest.mark.parametrize(("old", "action"), list(itertools.product(Load, [*LOAD_STEPS, "Other"])))
def test_a_load_moves_by_the_table_or_not_at_all(old, action):
    tracker = Tracker(7, load=old)
    expected = LOAD_LIFE.get((old, action))
    if expected is None:
        with pytest.raises(ProtocolError) as refusal:
            tracker.move_load(action)
        assert str(refusal.value) == f"the load of generation 7 is {old.value} (action {action})"
    else:
        tracker.move_load(action)
    assert tracker.load is (expected or old)


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


def test_results_are_ordered_from_good_to_bad():
    names = ["DONE", "REFUSED", "FAILED", "DROPPED", "INDETERMINATE"]
    assert [r.name for r in sorted(Result)] == names


def test_every_life_has_its_name():
    assert {life.value for life in Life} == {"queued", "running", "quarantined", "reported"}
