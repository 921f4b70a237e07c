"""Stores in the ledger: what it issues, what it leaves for later, and under which name each block left is counted."""

from typing import Any

import pytest

from kvledger.protocol import Decline, Result
from kvledger.protocol import ledger as ledger_module
from tests.support.ledgers import (
    BLOCKS,
    HASHES,
    OTHER,
    bad,
    declined,
    done,
    load,
    make_ledger,
    nothing_to_store,
    settle,
    store,
)


class TestProgress:
    def test_of_a_request_without_a_generation_there_is_none(self):
        assert make_ledger().progress("r") == (0, ())

    def test_counts_what_was_issued_and_what_is_to_be_issued_again(self):
        ledger = make_ledger("r")
        job = store(ledger, "r", 4)
        ledger.apply_report(bad(job, 0, Result.FAILED, 3, 1), 0.0)
        assert ledger.progress("r") == (4, (1, 3))

    def test_is_through_when_nothing_is_left_of_the_first_blocks(self):
        ledger = make_ledger("r")
        assert not ledger.is_through("r", 2)
        job = store(ledger, "r", 2)
        assert [ledger.is_through("r", limit) for limit in (1, 2, 3)] == [True, True, False]
        ledger.apply_report(bad(job, 0, Result.FAILED, 1), 0.0)
        assert not ledger.is_through("r", 2)

    def test_is_not_through_while_a_load_is_pending(self):
        ledger = make_ledger("r")
        load(ledger, "r")
        assert not ledger.is_through("r", 0)

    def test_is_through_without_a_generation_or_once_it_may_never_store(self):
        ledger = make_ledger("r", "s")
        assert ledger.is_through("unknown", 2)
        ledger.apply_report(bad(load(ledger, "r", sync=True), 0, Result.FAILED), 0.0)
        assert ledger.is_through("r", 2)
        assert not ledger.is_through("s", 2)


class TestWantsStore:
    def test_only_of_a_generation_with_new_blocks(self):
        ledger = make_ledger("r")
        assert not ledger.wants_store("unknown", 2, 0.0)
        assert not ledger.wants_store("r", 0, 0.0)
        assert ledger.wants_store("r", 1, 0.0)
        store(ledger, "r", 2)
        assert not ledger.wants_store("r", 2, 0.0)
        assert not ledger.wants_store("r", 1, 0.0)

    def test_not_while_the_pin_budget_is_used_up(self):
        ledger = make_ledger("r", max_pinned_blocks=2)
        job = store(ledger, "r", 2)
        assert not ledger.wants_store("r", 3, 0.0)
        ledger.apply_report(done(job), 0.0)
        assert ledger.wants_store("r", 3, 0.0)


class TestDeclined:
    def test_blocks_beyond_the_budget_are_counted_once_per_ask_and_wait(self):
        ledger = make_ledger("r", max_pinned_blocks=1)
        first = store(ledger, "r", 3)
        assert nothing_to_store(ledger, "r", 3)
        assert declined(ledger) == {Decline.BUDGET.value: 2}
        ledger.apply_report(done(first), 0.0)
        assert store(ledger, "r", 3).block_ids == (11,)

    def test_the_budget_is_one_of_distinct_blocks(self):
        ledger = make_ledger("a", "b", max_pinned_blocks=2)
        store(ledger, "a", 2)
        assert store(ledger, "b", 1, blocks=[11], hashes=[b"another"]).block_ids == (11,)
        assert ledger.snapshot().pins.blocks == 2

    @pytest.mark.parametrize("size", [3, 2_000])
    def test_known_blocks_are_counted_and_passed_over(self, size):
        ledger = make_ledger("a", "b", max_pinned_blocks=size + 1)
        table: dict[str, Any] = {"blocks": range(size + 1), "hashes": [i.to_bytes(8, "big") for i in range(size + 1)]}
        ledger.apply_report(done(store(ledger, "a", size, **table)), 0.0)
        assert store(ledger, "b", size + 1, **table).block_ids == (size,)
        assert declined(ledger) == {Decline.KNOWN.value: size}
        assert ledger.progress("b") == (size + 1, ())

    def test_blocks_that_went_wrong_or_that_a_lookup_missed_are_not_known(self):
        ledger = make_ledger("a", "b")
        ledger.apply_report(bad(store(ledger, "a", 4), 0, Result.FAILED, 1), 0.0)
        ledger.forget_known(HASHES[2:3])
        assert store(ledger, "b", 4, now=1.0).block_ids == (11, 12)

    def test_blocks_in_flight_are_counted_and_looked_at_again_after_the_backoff(self):
        ledger = make_ledger("a", "b")
        job = store(ledger, "a", 2)
        assert store(ledger, "b", 3, now=5.0).block_ids == (12,)
        assert declined(ledger) == {Decline.IN_FLIGHT.value: 2}
        ledger.apply_report(bad(job, 0, Result.DROPPED), 5.0)
        ledger.end_generation("a")

        assert not ledger.wants_store("b", 2, 5.9)
        assert nothing_to_store(ledger, "b", 2, now=5.9)
        assert store(ledger, "b", 2, now=6.0).block_ids == (10, 11)

    def test_asks_of_a_generation_that_waits_for_a_load(self):
        ledger = make_ledger("r")
        job = load(ledger, "r")
        for _ in range(3):
            assert nothing_to_store(ledger, "r", 4)
        assert declined(ledger) == {Decline.LOAD_PENDING.value: 3}
        ledger.apply_report(done(job), 0.0)
        assert store(ledger, "r", 4).block_ids == (12, 13)

    def test_asks_of_a_tainted_generation(self):
        ledger = make_ledger("r")
        ledger.apply_report(bad(load(ledger, "r", sync=True), 0, Result.FAILED), 0.0)
        for _ in range(2):
            assert nothing_to_store(ledger, "r", 2)
        assert declined(ledger) == {Decline.TAINTED.value: 2}

    def test_blocks_given_up_after_the_configured_attempts(self):
        ledger = make_ledger("r", max_store_attempts=2)
        for now in (0.0, 100.0):
            ledger.apply_report(bad(store(ledger, "r", 3, now=now), 0, Result.FAILED, 0, 1), now)
        assert declined(ledger) == {Decline.ATTEMPTS.value: 2}
        assert ledger.progress("r") == (3, ())


class TestRetries:
    def test_of_a_block_beyond_what_is_storable_wait(self):
        ledger = make_ledger("r")
        ledger.apply_report(bad(store(ledger, "r", 3), 0, Result.DROPPED), 0.0)

        assert store(ledger, "r", 1, now=1.0).block_ids == (10,)
        assert ledger.progress("r") == (3, (1, 2))
        assert store(ledger, "r", 3, now=1.0).block_ids == (11, 12)

    def test_come_in_table_order_with_new_blocks(self):
        ledger = make_ledger("r")
        ledger.apply_report(bad(store(ledger, "r", 3), 0, Result.FAILED, 2, 0), 0.0)
        assert store(ledger, "r", 4, now=1.0).block_ids == (10, 12, 13)

    def test_of_an_issued_block_are_counted_from_its_last_report(self):
        ledger = make_ledger("r", max_store_attempts=3)
        for now in (0.0, 5.0):
            ledger.apply_report(bad(store(ledger, "r", 1, now=now), 0, Result.FAILED), now + 1.0)
            assert [ledger.wants_store("r", 1, now + later) for later in (1.9, 2.0, 2.5)] == [False, True, True]


class TestPressure:
    @pytest.mark.parametrize("result", [r for r in Result if r is not Result.DONE])
    def test_comes_from_refusals_failures_and_unknown_ends_but_not_from_drops(self, result):
        ledger = make_ledger("a", "b")
        ledger.apply_report(bad(store(ledger, "a", 1), 0, result), 0.0)
        assert nothing_to_store(ledger, "b", 1, now=0.5, **OTHER) == (result is not Result.DROPPED)

    def test_holds_back_everyone_then_lets_one_probe_through_until_something_is_stored(self):
        ledger = make_ledger("a", "b")
        ledger.apply_report(bad(store(ledger, "a", 1), 0, Result.REFUSED), 0.0)
        assert nothing_to_store(ledger, "b", 2, now=0.5, **OTHER)
        probe = store(ledger, "b", 1, now=1.5, **OTHER)
        assert nothing_to_store(ledger, "b", 2, now=1.6, **OTHER)
        assert declined(ledger) == {Decline.BACKOFF.value: 2}
        ledger.apply_report(done(probe), 1.7)
        assert store(ledger, "b", 2, now=1.8, **OTHER).block_ids == (21,)

    def test_backs_off_to_half_a_minute_at_most(self):
        ledger = make_ledger("r", max_store_attempts=100)
        now = 0.0
        for delay in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            job = store(ledger, "r", 1, now=now)
            ledger.apply_report(bad(job, 0, Result.REFUSED), now)
            assert nothing_to_store(ledger, "r", 1, now=now + delay - 0.1)
            now += delay

    @pytest.mark.parametrize("what", ["known", "in flight", "beyond storable", "not due"])
    def test_its_probe_is_not_spent_on_a_request_with_nothing_to_issue(self, what):
        ledger = make_ledger("idle", "refused")
        job = store(ledger, "idle", 2)
        if what == "known":
            ledger.apply_report(done(job), 0.0)
            ledger.begin_generation("idle")
        elif what == "in flight":
            ledger.begin_generation("idle")
        elif what == "beyond storable":
            ledger.apply_report(bad(job, 0, Result.DROPPED, 1), 0.0)
        else:
            ledger.apply_report(bad(job, 0, Result.DROPPED), 0.9)
        ledger.apply_report(bad(store(ledger, "refused", 1, **OTHER), 0, Result.REFUSED), 0.0)

        assert nothing_to_store(ledger, "idle", 1 if what == "beyond storable" else 2, now=1.0)

        retries = {"known": (), "in flight": (0, 1), "beyond storable": (1,), "not due": (0, 1)}
        assert ledger.progress("idle") == (2, retries[what])
        assert store(ledger, "refused", 1, now=1.0, **OTHER).block_ids == (20,)

    def test_holds_back_the_only_block_that_may_be_pinned(self):
        ledger = make_ledger("a", "b", max_pinned_blocks=1)
        ledger.apply_report(bad(store(ledger, "a", 1), 0, Result.REFUSED), 0.0)
        assert nothing_to_store(ledger, "b", 1, now=0.5, **OTHER)
        assert declined(ledger) == {Decline.BACKOFF.value: 1}

    def test_holds_back_a_block_that_is_pinned_already_though_the_budget_is_used_up(self):
        ledger = make_ledger("held", "refused", "next", max_pinned_blocks=1)
        store(ledger, "held", 1)
        shared = store(ledger, "refused", 1, blocks=BLOCKS[:1], hashes=[b"refused"])
        ledger.apply_report(bad(shared, 0, Result.REFUSED), 0.0)
        assert nothing_to_store(ledger, "next", 1, now=0.5, blocks=BLOCKS[:1], hashes=[b"next"])
        assert declined(ledger) == {Decline.BACKOFF.value: 1}

    def test_its_probe_is_not_spent_on_a_block_that_the_budget_holds_back(self):
        """While a synchronous load is in flight, requests are asked for stores even with the budget used up."""
        ledger = make_ledger("held", "refused", "next", "loading", max_pinned_blocks=2)
        held = store(ledger, "held", 1)
        ledger.apply_report(bad(store(ledger, "refused", 1, **OTHER), 0, Result.REFUSED), 0.0)
        store(ledger, "refused", 1, now=1.0, **OTHER)
        load(ledger, "loading", sync=True, blocks=[1], hashes=[b"loading"])
        more: dict[str, Any] = {"now": 2.0, "blocks": [30], "hashes": [b"more"]}

        assert ledger.wants_store("next", 1, 2.0)
        assert nothing_to_store(ledger, "next", 1, **more)
        assert declined(ledger) == {Decline.BUDGET.value: 1}
        ledger.apply_report(bad(held, 0, Result.DROPPED), 2.0)

        assert store(ledger, "next", 1, **more).block_ids == (30,)


def test_blocks_that_are_forgotten_as_known_are_stored_again_and_nothing_else_changes():
    """131,072 hashes are known at most: beyond that the oldest cost a probe and a put that the store answers at once."""
    assert ledger_module.KNOWN_HASHES == 131_072
    ledger = make_ledger("a", "b")
    ledger._known._capacity = 2
    settle(ledger, done(store(ledger, "a", 3)))
    again = store(ledger, "b", 3)
    assert again.hashes == tuple(HASHES[:1])
    assert settle(ledger, done(again)).released == tuple(BLOCKS[:1])
