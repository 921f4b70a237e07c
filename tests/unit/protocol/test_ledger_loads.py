"""Loads in the ledger: who hears of them, who rests on them, and what their end changes."""

from typing import Any

import pytest

from kvledger.protocol import Decline, Kind, Load, Result
from tests.support.ledgers import (
    BLOCKS,
    HASHES,
    OTHER,
    OTHER_BLOCKS,
    OTHER_HASHES,
    bad,
    done,
    load,
    make_ledger,
    nothing_to_store,
    settle,
    store,
)


@pytest.mark.parametrize(("sync", "reply_to"), [(False, "r"), (True, "")])
def test_an_asynchronous_load_names_the_request_that_waits_for_it_a_synchronous_one_nobody(sync, reply_to):
    job = load(make_ledger("r"), "r", sync=sync)
    assert (job.kind, job.reply_to, job.sync, job.generation) == (Kind.LOAD, reply_to, sync, 1)
    assert (job.block_ids, job.hashes) == (tuple(BLOCKS[:2]), tuple(HASHES[:2]))


def test_the_open_load_is_the_one_of_the_current_generation_until_it_is_settled():
    ledger = make_ledger("r", num_ranks=2)
    assert ledger.open_load("r") is None
    assert ledger.open_load("unknown") is None
    job = load(ledger, "r")
    ledger.apply_report(done(job, 0), 0.0)
    assert ledger.open_load("r") == job.job_id

    ledger.apply_report(done(job, 1), 0.0)

    assert ledger.open_load("r") is None


def test_a_new_generation_has_no_open_load_although_the_old_one_runs():
    ledger = make_ledger("r")
    load(ledger, "r")
    ledger.begin_generation("r")

    assert ledger.open_load("r") is None
    assert ledger.load_state("r") is Load.NONE
    assert ledger.loads_in_flight() == 1


def test_loads_in_flight_are_loads():
    ledger = make_ledger("a", "b", "c")
    store(ledger, "a", 1)
    store(ledger, "a", 2)
    assert ledger.loads_in_flight() == 0
    job = load(ledger, "b", **OTHER)
    assert ledger.loads_in_flight() == 1
    ledger.apply_report(done(job), 0.0)
    assert ledger.loads_in_flight() == 0


@pytest.mark.parametrize("sync", [False, True])
def test_a_load_that_arrived_says_so_and_releases_and_taints_nothing(sync):
    ledger = make_ledger("r")
    job = load(ledger, "r", sync=sync)

    settled = settle(ledger, done(job))

    assert ledger.load_state("r") is Load.LOADED
    assert (settled.job, settled.request_id, settled.result, settled.bad) == (job, "r", Result.DONE, ())
    assert (settled.released, settled.tainted, settled.current) == ((), (), True)


def test_a_failed_asynchronous_load_taints_nobody_and_what_is_recomputed_is_stored():
    ledger = make_ledger("r", "sharer")
    job = load(ledger, "r")

    settled = settle(ledger, bad(job, 0, Result.FAILED, 1))

    assert ledger.load_state("r") is Load.FAILED
    assert (settled.bad, settled.released, settled.tainted, settled.current) == ((1,), (), (), True)
    assert store(ledger, "r", 2).block_ids == (11,)


def test_a_failed_load_may_be_followed_by_another():
    ledger = make_ledger("r")
    ledger.apply_report(bad(load(ledger, "r"), 0, Result.FAILED), 0.0)
    job = load(ledger, "r")
    assert ledger.load_state("r") is Load.PENDING
    assert ledger.open_load("r") == job.job_id


def test_the_end_of_an_older_generations_load_changes_no_newer_tracker():
    ledger = make_ledger("r")
    old = load(ledger, "r", sync=True)
    ledger.begin_generation("r")

    settled = settle(ledger, bad(old, 0, Result.FAILED))

    assert not settled.current
    assert settled.tainted == ()
    assert ledger.load_state("r") is Load.NONE


@pytest.mark.parametrize("sync", [False, True])
def test_a_request_whose_load_failed_is_offered_no_hit_until_it_is_over(sync):
    ledger = make_ledger("r", "other")
    assert ledger.may_hit("r")
    ledger.apply_report(bad(load(ledger, "r", sync=sync), 0, Result.FAILED, 1), 0.0)
    ledger.begin_generation("r")
    assert not ledger.may_hit("r")
    assert ledger.may_hit("other")
    ledger.end_request("r")
    assert ledger.may_hit("r")
    ledger.end_request("r")


def test_good_loads_failed_stores_and_loads_of_older_generations_leave_the_next_hit_alone():
    ledger = make_ledger("good", "saver", "r")
    ledger.apply_report(done(load(ledger, "good")), 0.0)
    ledger.apply_report(bad(store(ledger, "saver", 3), 0, Result.FAILED), 0.0)
    old = load(ledger, "r", **OTHER)
    ledger.begin_generation("r")
    ledger.apply_report(bad(old, 0, Result.FAILED), 0.0)
    assert ledger.view().nohit == frozenset()


def test_what_a_load_brought_is_known_to_be_stored():
    ledger = make_ledger("r", "s")
    ledger.apply_report(done(load(ledger, "r")), 0.0)

    assert store(ledger, "s", 3).block_ids == (12,)
    assert ledger.snapshot().declined[Decline.KNOWN.value] == 2


class TestSynchronousLoadsThatOthersShare:
    def test_the_failed_load_names_everyone_who_rests_on_it_once(self):
        ledger = make_ledger("loader", "sharer", "stranger")
        job = load(ledger, "loader", sync=True)
        for request in ("loader", "sharer"):
            assert nothing_to_store(ledger, request, 4)
        store(ledger, "stranger", 1, **OTHER)

        settled = settle(ledger, bad(job, 0, Result.FAILED, 1))

        assert sorted(settled.tainted) == ["loader", "sharer"]
        states = [ledger.load_state(r) for r in ("loader", "sharer", "stranger")]
        assert states == [Load.TAINTED, Load.TAINTED, Load.NONE]
        assert not ledger.wants_store("sharer", 8, 100.0)

    def test_a_loader_that_is_gone_is_not_named(self):
        ledger = make_ledger("loader", "sharer")
        job = load(ledger, "loader", sync=True)
        assert nothing_to_store(ledger, "sharer", 4)
        ledger.end_generation("loader")

        assert settle(ledger, bad(job, 0, Result.FAILED)).tainted == ("sharer",)

    def test_the_loaders_next_generation_waits_for_the_old_load_like_anyone_else(self):
        ledger = make_ledger("r")
        job = load(ledger, "r", sync=True)
        ledger.begin_generation("r")
        assert nothing_to_store(ledger, "r", 2)

        assert settle(ledger, bad(job, 0, Result.FAILED)).tainted == ("r",)
        assert ledger.load_state("r") is Load.TAINTED

    def test_a_generation_waits_for_every_load_it_shares(self):
        ledger = make_ledger("one", "two", "sharer")
        first = load(ledger, "one", sync=True)
        second = load(ledger, "two", sync=True, blocks=OTHER_BLOCKS[:2], hashes=OTHER_HASHES[:2])
        both: dict[str, Any] = {"blocks": [*BLOCKS[:2], *OTHER_BLOCKS], "hashes": [*HASHES[:2], *OTHER_HASHES]}
        for job in (first, second):
            assert nothing_to_store(ledger, "sharer", 6, **both)
            ledger.apply_report(done(job), 0.0)

        assert store(ledger, "sharer", 6, **both).block_ids == (22, 23)

    @pytest.mark.parametrize("open_one", ["older", "younger"])
    def test_one_load_that_arrives_leaves_the_targets_of_another_known(self, open_one):
        ledger = make_ledger("one", "two", "late")
        if open_one == "older":
            load(ledger, "two", sync=True, **OTHER)
        arriving = load(ledger, "one", sync=True)
        if open_one == "younger":
            load(ledger, "two", sync=True, **OTHER)
        ledger.apply_report(done(arriving), 0.0)

        assert nothing_to_store(ledger, "late", 4, **OTHER)

    def test_whoever_is_scheduled_meanwhile_is_asked_even_without_new_blocks(self):
        ledger = make_ledger("loader", "other")
        job = load(ledger, "loader", sync=True)
        assert ledger.wants_store("other", 0, 0.0)
        ledger.apply_report(done(job), 0.0)
        assert not ledger.wants_store("other", 0, 0.0)

    def test_an_asynchronous_load_is_nobody_elses_business(self):
        ledger = make_ledger("loader", "other")
        load(ledger, "loader")
        assert not ledger.wants_store("other", 0, 0.0)
        assert store(ledger, "other", 1).block_ids == (10,)
