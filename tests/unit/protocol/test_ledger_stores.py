"""What the ledger issues, what it leaves, and which name each block left behind is counted under."""

import pytest

from kvledger.protocol import Decline, Kind, Result
from kvledger.protocol import ledger as ledger_module
from tests.support.ledgers import (
    BLOCKS,
    HASHES,
    OTHER_BLOCKS,
    OTHER_HASHES,
    bad,
    done,
    load,
    make_ledger,
    nothing_to_store,
    store,
)

OTHER = {"blocks": OTHER_BLOCKS, "hashes": OTHER_HASHES}


def declined(ledger) -> dict[str, int]:
    return {name: count for name, count in ledger.snapshot().declined.items() if count}


class TestNumbers:
    def test_jobs_and_generations_are_numbered_as_in_the_model(self):
        ledger = make_ledger()
        assert [ledger.begin_generation(r) for r in "aba"] == [1, 2, 3]
        jobs = [store(ledger, "a", 1), load(ledger, "b"), store(ledger, "a", 3)]
        assert [(j.job_id, j.generation) for j in jobs] == [(1, 3), (2, 2), (3, 3)]

    def test_the_current_generation_can_be_asked_for(self):
        ledger = make_ledger("a", "b")
        assert (ledger.generation("a"), ledger.generation("b"), ledger.generation("x")) == (1, 2, None)
        ledger.end_generation("a")
        assert (ledger.generation("a"), ledger.generation("b")) == (None, 2)

    def test_all_engines_start_in_the_same_epoch(self):
        ledger = make_ledger("r")
        assert ledger.epoch == ""
        assert store(ledger, "r", 1).epoch == ""
        ledger.reset("e1")
        assert ledger.epoch == "e1"

    def test_a_store_job_answers_nobody(self):
        job = store(make_ledger("r"), "r", 2)
        assert (job.kind, job.reply_to, job.sync, job.group) == (Kind.STORE, "", False, 0)
        assert job.hashes == tuple(HASHES[:2])

    def test_a_settled_store_names_its_job_and_request(self):
        ledger = make_ledger("r")
        job = store(ledger, "r", 2)
        settled = ledger.apply_report(done(job), 0.0)
        assert (settled.job, settled.request_id, settled.result) == (job, "r", Result.DONE)
        assert (settled.bad, settled.tainted, settled.current) == ((), (), True)


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
        assert ledger.is_through("r", 1)
        assert ledger.is_through("r", 2)
        assert not ledger.is_through("r", 3)
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
    def test_blocks_beyond_the_budget_are_counted_once_per_ask(self):
        ledger = make_ledger("r", max_pinned_blocks=1)
        store(ledger, "r", 3)
        assert nothing_to_store(ledger, "r", 3)
        assert declined(ledger) == {Decline.BUDGET.value: 2}

    def test_the_budget_is_one_of_distinct_blocks(self):
        ledger = make_ledger("a", "b", max_pinned_blocks=2)
        store(ledger, "a", 2)
        assert store(ledger, "b", 1, blocks=[11], hashes=[b"another"]).block_ids == (11,)
        assert ledger.snapshot().pins.blocks == 2

    def test_known_blocks_are_counted_and_passed_over(self):
        ledger = make_ledger("a", "b")
        ledger.apply_report(done(store(ledger, "a", 3)), 0.0)
        assert store(ledger, "b", 4).block_ids == (13,)
        assert declined(ledger) == {Decline.KNOWN.value: 3}
        assert ledger.progress("b") == (4, ())

    def test_a_block_that_went_wrong_is_not_known(self):
        ledger = make_ledger("a", "b")
        ledger.apply_report(bad(store(ledger, "a", 3), 0, Result.FAILED, 1), 0.0)
        assert store(ledger, "b", 3, now=1.0).block_ids == (11,)

    def test_blocks_in_flight_are_counted_and_looked_at_again_after_the_backoff(self):
        ledger = make_ledger("a", "b")
        job = store(ledger, "a", 2)
        assert nothing_to_store(ledger, "b", 2, now=5.0)
        assert declined(ledger) == {Decline.IN_FLIGHT.value: 2}
        ledger.apply_report(bad(job, 0, Result.DROPPED), 5.0)
        ledger.end_generation("a")

        assert not ledger.wants_store("b", 2, 5.9)
        assert nothing_to_store(ledger, "b", 2, now=5.9)
        assert store(ledger, "b", 2, now=6.0).block_ids == (10, 11)

    def test_asks_of_a_generation_that_waits_for_a_load(self):
        ledger = make_ledger("r")
        load(ledger, "r")
        for _ in range(3):
            assert nothing_to_store(ledger, "r", 2)
        assert declined(ledger) == {Decline.LOAD_PENDING.value: 3}

    def test_asks_of_a_tainted_generation(self):
        ledger = make_ledger("r")
        ledger.apply_report(bad(load(ledger, "r", sync=True), 0, Result.FAILED), 0.0)
        for _ in range(2):
            assert nothing_to_store(ledger, "r", 2)
        assert declined(ledger) == {Decline.TAINTED.value: 2}

    def test_asks_under_pressure(self):
        ledger = make_ledger("a", "b")
        ledger.apply_report(bad(store(ledger, "a", 1), 0, Result.REFUSED), 0.0)
        for _ in range(3):
            assert nothing_to_store(ledger, "b", 2, now=0.5, **OTHER)
        assert declined(ledger) == {Decline.BACKOFF.value: 3}

    def test_blocks_given_up(self):
        ledger = make_ledger("r", max_store_attempts=1)
        ledger.apply_report(bad(store(ledger, "r", 3), 0, Result.FAILED, 0, 2), 0.0)
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
            assert not ledger.wants_store("r", 1, now + 1.9)
            assert ledger.wants_store("r", 1, now + 2.0)
            assert ledger.wants_store("r", 1, now + 2.5)


class TestPressure:
    def test_comes_from_refusals_failures_and_unknown_ends_but_not_from_drops(self):
        for result in (Result.REFUSED, Result.FAILED, Result.INDETERMINATE, Result.DROPPED):
            ledger = make_ledger("a", "b")
            ledger.apply_report(bad(store(ledger, "a", 1), 0, result), 0.0)
            assert nothing_to_store(ledger, "b", 1, now=0.5, **OTHER) == (result is not Result.DROPPED)

    def test_backs_off_to_half_a_minute_at_most(self):
        ledger = make_ledger("r", max_store_attempts=100)
        now = 0.0
        for delay in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            job = store(ledger, "r", 1, now=now)
            ledger.apply_report(bad(job, 0, Result.REFUSED), now)
            assert nothing_to_store(ledger, "r", 1, now=now + delay - 0.1)
            now += delay

    @pytest.mark.parametrize("what", ["known", "beyond storable", "not due"])
    def test_its_probe_is_not_spent_on_a_request_with_nothing_to_issue(self, what):
        ledger = make_ledger("idle", "refused")
        storable, blocks = {
            "known": (2, 2),
            "beyond storable": (1, 2),
            "not due": (2, 2),
        }[what]
        job = store(ledger, "idle", blocks)
        if what == "known":
            ledger.apply_report(done(job), 0.0)
            ledger.begin_generation("idle")
        elif what == "beyond storable":
            ledger.apply_report(bad(job, 0, Result.DROPPED, 1), 0.0)
        else:
            ledger.apply_report(bad(job, 0, Result.DROPPED), 0.9)
        ledger.apply_report(bad(store(ledger, "refused", 1, **OTHER), 0, Result.REFUSED), 0.0)

        assert nothing_to_store(ledger, "idle", storable, now=1.0)

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
        more = {"now": 2.0, "blocks": [30], "hashes": [b"more"]}

        assert ledger.wants_store("next", 1, 2.0)
        assert nothing_to_store(ledger, "next", 1, **more)
        assert declined(ledger) == {Decline.BUDGET.value: 1}
        ledger.apply_report(bad(held, 0, Result.DROPPED), 2.0)

        assert store(ledger, "next", 1, **more).block_ids == (30,)


class TestReset:
    def test_what_was_stored_before_it_is_stored_again(self):
        ledger = make_ledger("r")
        ledger.apply_report(done(store(ledger, "r", 2)), 0.0)
        ledger.reset("e1")
        ledger.begin_generation("r")
        assert store(ledger, "r", 2).block_ids == (10, 11)

    @pytest.mark.parametrize(("before", "after"), [("e1", "e2"), ("e2", "e1")])
    def test_what_is_stored_across_it_is_stored_again(self, before, after):
        ledger = make_ledger()
        ledger.reset(before)
        ledger.begin_generation("r")
        job = store(ledger, "r", 2)
        ledger.reset(after)
        ledger.begin_generation("r")
        ledger.apply_report(done(job), 0.0)
        assert store(ledger, "r", 2).block_ids == (10, 11)

    def test_it_ends_every_generation_but_those_that_load(self):
        ledger = make_ledger("idle", "loading", "loaded")
        load(ledger, "loading")
        ledger.apply_report(done(load(ledger, "loaded", **OTHER)), 0.0)
        assert ledger.reset("e1") == {"loading"}
        assert [ledger.generation(r) for r in ("idle", "loading", "loaded")] == [None, 2, None]

    def test_a_second_one_while_the_load_is_still_out_answers_the_same(self):
        ledger = make_ledger("r")
        job = load(ledger, "r")
        assert ledger.reset("e1") == {"r"}
        assert ledger.reset("e2") == {"r"}
        ledger.apply_report(done(job), 0.0)

        assert nothing_to_store(ledger, "r", 4)
        assert ledger.generation("r") == 1
        assert ledger.reset("e3") == set()


def test_a_long_prompt_is_remembered_whole():
    ledger = make_ledger("a", "b", max_pinned_blocks=50_000)
    size = 2_000
    table = {"blocks": range(size), "hashes": [i.to_bytes(8, "big") for i in range(size)]}
    ledger.apply_report(done(store(ledger, "a", size, **table)), 0.0)
    assert nothing_to_store(ledger, "b", size, **table)
    assert declined(ledger) == {Decline.KNOWN.value: size}


def test_a_hash_that_a_lookup_missed_is_stored_again():
    ledger = make_ledger("a", "b")
    ledger.apply_report(done(store(ledger, "a", 3)), 0.0)
    ledger.forget_known(HASHES[1:2])
    assert store(ledger, "b", 3).block_ids == (11,)


def test_settled_jobs_are_remembered_so_that_their_reports_are_told_from_strangers(monkeypatch):
    monkeypatch.setattr(ledger_module, "RETIRED_REMEMBERED", 2)
    ledger = make_ledger("r")
    jobs = [store(ledger, "r", i + 1) for i in range(3)]
    for job in jobs:
        ledger.apply_report(done(job), 0.0)

    for job, why in zip(jobs, ("never emitted, or long ago", "already reported", "already reported"), strict=True):
        with pytest.raises(ledger_module.ProtocolError, match=why):
            ledger.apply_report(done(job), 0.0)


def test_figures_count_everything_by_its_name():
    ledger = make_ledger("r", "loading", "idle")
    for i, result in enumerate((Result.FAILED, Result.FAILED, Result.DONE)):
        job = store(ledger, "r", 2 * i + 2, now=100.0 * i)
        ledger.apply_report(done(job) if result is Result.DONE else bad(job, 0, result, 0), 100.0 * i)
    ledger.apply_report(done(load(ledger, "idle", **OTHER)), 0.0)
    load(ledger, "loading")
    store(ledger, "r", len(BLOCKS), now=300.0)

    figures = ledger.snapshot()

    assert (figures.open_jobs, figures.generations, figures.loads_in_flight) == (2, 3, 1)
    zero = {"done": 0, "refused": 0, "failed": 0, "dropped": 0, "indeterminate": 0}
    assert figures.settled == {"store": {**zero, "done": 1, "failed": 2}, "load": {**zero, "done": 1}}
    assert set(figures.declined) == {d.value for d in Decline}
    assert (figures.pins.blocks, figures.pins.jobs, figures.retries) == (2, 1, 0)
