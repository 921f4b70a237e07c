"""Faults: every one is counted, a kind is told once per interval, with how many there were since."""

import logging

import pytest

from kvledger.observe.faults import Faults
from kvledger.protocol import Breaker


class Clock:
    """A clock that moves only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock, caplog) -> Faults:
    caplog.set_level(logging.DEBUG, logger="kvledger.observe.faults")
    return Faults("rank 3", interval_s=10.0, clock=clock)


def test_the_first_of_a_kind_is_told_at_once_with_code_and_meaning(faults, caplog):
    faults.answers("put", [-200])
    assert caplog.messages == [
        "kvledger rank 3: put NO_AVAILABLE_HANDLE: NO_AVAILABLE_HANDLE (-200): the store is full"
    ]


def test_later_ones_are_counted_and_told_together_after_the_interval(faults, clock, caplog):
    for clock.now in (0.0, 1.0, 9.9):
        faults.answers("put", [-900, -900])
    assert len(caplog.messages) == 1
    clock.now = 10.0
    faults.answers("put", [-900])
    assert len(caplog.messages) == 2
    assert "5 times since the last line" in caplog.messages[1]
    assert faults.counts() == {"put RPC_FAIL": 7}


def test_kinds_do_not_hide_each_other(faults, caplog):
    faults.answers("put", [-200, -900])
    faults.answers("get", [-900, 17])
    faults.answers("exists", [-54_321])
    faults.raised("get", ValueError("odd"))
    assert len(caplog.messages) == 6
    assert faults.counts() == {
        "put NO_AVAILABLE_HANDLE": 1,
        "put RPC_FAIL": 1,
        "get RPC_FAIL": 1,
        "get wrong size": 1,
        "exists code -54321": 1,
        "get ValueError": 1,
    }


def test_what_was_not_told_is_told_at_the_end_once(faults, caplog):
    for _ in range(3):
        faults.answers("put", [-900])
    faults.flush()
    faults.flush()
    assert [m for m in caplog.messages if "2 more" in m] == caplog.messages[1:]
    assert len(caplog.messages) == 2


def test_a_breaker_is_told_to_open_to_probe_and_to_close_but_is_no_fault(faults, caplog):
    breaker = Breaker(threshold=2, initial_s=1.0, max_s=5.0)
    assert faults.allowed("store", breaker, 0.0)
    faults.failed("store", breaker, 0.0)
    assert caplog.messages == []
    faults.failed("store", breaker, 0.0)
    assert not faults.allowed("store", breaker, 0.5)
    assert faults.allowed("store", breaker, 1.0)
    faults.worked("store", breaker)
    faults.worked("store", breaker)
    assert [m.split(": ")[1] for m in caplog.messages] == [
        "store breaker opened",
        "store breaker probes",
        "store breaker closed",
    ]
    assert "left alone for 1 s" in caplog.messages[0]
    assert faults.counts() == {}
    assert faults.transitions() == {f"store breaker {did}": 1 for did in ("opened", "probes", "closed")}
