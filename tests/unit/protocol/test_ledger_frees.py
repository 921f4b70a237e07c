"""`has_pending_frees`: while reports come, vLLM may wait for blocks that hang on our pins; when they stall, it does not."""

import pytest

from kvledger.protocol import Ledger, Result
from tests.support.ledgers import OTHER_BLOCKS, OTHER_HASHES, bad, done, load, make_ledger, store


def frees(ledger: Ledger, now: float) -> bool:
    """All blocks have no reference but ours."""
    ours = dict(ledger._pins.blocks())
    return ledger.has_pending_frees(ours.__getitem__, now)


def test_within_the_stall_timeout_of_the_first_pins():
    ledger = make_ledger("r")
    store(ledger, "r", 2, now=100.0)
    assert frees(ledger, 110.0)
    assert not frees(ledger, 110.1)


def test_a_store_report_is_progress():
    ledger = make_ledger("r", num_ranks=2)
    job = store(ledger, "r", 2, now=100.0)
    ledger.apply_report(done(job, 0), 109.0)
    assert frees(ledger, 119.0)
    assert not frees(ledger, 119.1)


def test_a_failed_store_is_progress_too():
    ledger = make_ledger("r", num_ranks=2)
    job = store(ledger, "r", 2, now=100.0)
    ledger.apply_report(bad(job, 0, Result.FAILED), 109.0)
    assert frees(ledger, 119.0)


def test_later_stores_do_not_hide_a_stall():
    ledger = make_ledger("r")
    store(ledger, "r", 1, now=100.0)
    store(ledger, "r", 2, now=109.0)
    assert not frees(ledger, 110.1)


def test_a_new_busy_period_starts_with_its_first_pins():
    ledger = make_ledger("r")
    ledger.apply_report(done(store(ledger, "r", 1, now=100.0)), 100.0)
    store(ledger, "r", 2, now=200.0)
    assert frees(ledger, 209.0)


@pytest.mark.parametrize("reported", [False, True])
def test_loads_do_not_hide_a_stall(reported):
    ledger = make_ledger("r", "s")
    store(ledger, "r", 1, now=100.0)
    job = ledger.emit_load("s", OTHER_BLOCKS[:2], OTHER_HASHES[:2], sync=False, now=109.0)
    if reported:
        ledger.apply_report(done(job), 109.0)
    assert not frees(ledger, 110.1)


def test_loads_pin_nothing():
    ledger = make_ledger("s")
    load(ledger, "s")
    assert not frees(ledger, 0.0)
    assert ledger.has_open_jobs()
    assert ledger.snapshot().pins.blocks == 0
