"""The scheduler side's ledger: names and numbers, pins, reports, generations, resets, figures."""

import random
from collections.abc import Callable

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import Decline, Job, Kind, Ledger, Result
from kvledger.protocol import ledger as ledger_module
from tests.support.ledgers import (
    BLOCKS,
    HASHES,
    OTHER,
    OTHER_BLOCKS,
    bad,
    done,
    load,
    make_ledger,
    nothing_to_store,
    settle,
    store,
)


class TestJobs:
    def test_and_generations_are_numbered_as_in_the_model(self):
        ledger = make_ledger()
        assert [ledger.begin_generation(r) for r in "aba"] == [1, 2, 3]
        jobs = [store(ledger, "a", 1), load(ledger, "b"), store(ledger, "a", 3)]
        assert [(j.job_id, j.generation) for j in jobs] == [(1, 3), (2, 2), (3, 3)]

    def test_of_stores_answer_nobody(self):
        job = store(make_ledger("r"), "r", 2)
        assert (job.kind, job.reply_to, job.sync, job.group) == (Kind.STORE, "", False, 0)
        assert job.hashes == tuple(HASHES[:2])

    def test_share_nothing_with_the_lists_they_were_made_from(self):
        table, names = [*BLOCKS], [*HASHES]
        job = store(make_ledger("r"), "r", 2, blocks=table, hashes=names)
        table[0] = 99
        names[0] = b"other"
        assert (job.block_ids[0], job.hashes[0]) == (10, HASHES[0])


class TestReports:
    def test_of_every_rank_settle_the_job_and_release_its_blocks_tail_first(self):
        ledger = make_ledger("r", num_ranks=2)
        job = store(ledger, "r", 3)

        assert ledger.apply_report(done(job, 1), 0.0) is None
        assert ledger.snapshot().pins.blocks == 3
        settled = settle(ledger, done(job, 0))

        assert ledger.snapshot().pins.blocks == 0
        assert (settled.job, settled.request_id, settled.result) == (job, "r", Result.DONE)
        assert (settled.released, settled.bad, settled.tainted, settled.current) == ((12, 11, 10), (), (), True)

    def test_are_owed_and_the_pins_stay_although_the_generation_has_ended(self):
        ledger = make_ledger("r", num_ranks=2)
        job = store(ledger, "r", 2)
        ledger.end_generation("r")
        ledger.apply_report(done(job, 0), 0.0)
        assert ledger.snapshot().pins.blocks == 2
        assert ledger.has_open_jobs()

        settled = settle(ledger, done(job, 1))

        assert (settled.released, settled.current) == ((11, 10), False)

    @pytest.mark.parametrize("result", [r for r in Result if r is not Result.DONE])
    def test_release_the_blocks_whatever_the_result(self, result):
        ledger = make_ledger("r")
        settled = settle(ledger, bad(store(ledger, "r", 2), 0, result))

        assert settled.released == (11, 10)
        assert not ledger.has_open_jobs()

    def test_of_the_worst_rank_decide_and_the_bad_blocks_are_the_union(self):
        ledger = make_ledger("r", num_ranks=2)
        job = store(ledger, "r", 3)
        ledger.apply_report(bad(job, 0, Result.FAILED, 2), 0.0)
        settled = settle(ledger, bad(job, 1, Result.REFUSED, 1))
        assert (settled.result, settled.bad) == (Result.FAILED, (1, 2))

    def test_of_settled_jobs_are_told_from_those_of_strangers_for_a_while(self, monkeypatch):
        monkeypatch.setattr(ledger_module, "RETIRED_REMEMBERED", 2)
        ledger = make_ledger("r")
        jobs = [store(ledger, "r", i + 1) for i in range(3)]
        for job in jobs:
            ledger.apply_report(done(job), 0.0)

        for job, why in zip(jobs, ("never emitted, or long ago", "already reported", "already reported"), strict=True):
            with pytest.raises(ProtocolError, match=why):
                ledger.apply_report(done(job), 0.0)


class TestGenerations:
    def test_can_be_asked_for(self):
        ledger = make_ledger("a", "b")
        assert (ledger.generation("a"), ledger.generation("b"), ledger.generation("x")) == (1, 2, None)
        ledger.end_generation("a")
        assert (ledger.generation("a"), ledger.generation("b")) == (None, 2)

    def test_are_not_changed_by_late_results_of_older_ones(self):
        ledger = make_ledger("r")
        old = store(ledger, "r", 2)
        ledger.begin_generation("r")
        new = store(ledger, "r", 4, **OTHER)

        assert not settle(ledger, bad(old, 0, Result.FAILED)).current

        assert ledger.progress("r") == (4, ())
        assert settle(ledger, done(new)).current


class TestReset:
    def test_begins_an_epoch_that_new_jobs_carry(self):
        ledger = make_ledger("r")
        assert (ledger.epoch, store(ledger, "r", 1).epoch) == ("", "")
        ledger.reset("e1")
        ledger.begin_generation("r")
        assert (ledger.epoch, store(ledger, "r", 2, **OTHER).epoch) == ("e1", "e1")

    def test_what_was_stored_before_it_is_stored_again(self):
        ledger = make_ledger("r")
        ledger.apply_report(done(store(ledger, "r", 2)), 0.0)
        ledger.reset("e1")
        ledger.begin_generation("r")
        assert store(ledger, "r", 2).block_ids == (10, 11)

    @pytest.mark.parametrize(("before", "after"), [("e1", "e2"), ("e2", "e1")])
    @pytest.mark.parametrize("make", [lambda ledger: store(ledger, "r", 2), lambda ledger: load(ledger, "r")])
    def test_what_is_stored_or_loaded_across_it_is_stored_again(self, make, before, after):
        ledger = make_ledger()
        ledger.reset(before)
        ledger.begin_generation("r")
        job = make(ledger)
        ledger.reset(after)
        ledger.apply_report(done(job), 0.0)
        ledger.begin_generation("s")
        assert store(ledger, "s", 2).block_ids == (10, 11)

    def test_ends_every_generation_but_those_that_load(self):
        ledger = make_ledger("idle", "loading", "loaded")
        load(ledger, "loading")
        ledger.apply_report(done(load(ledger, "loaded", **OTHER)), 0.0)
        assert ledger.reset("e1") == {"loading"}
        assert [ledger.generation(r) for r in ("idle", "loading", "loaded")] == [None, 2, None]

    def test_a_second_one_while_the_load_is_still_out_answers_the_same(self):
        """Its generation stores nothing, also once the load has ended; the next one does."""
        ledger = make_ledger("r")
        job = load(ledger, "r")
        assert ledger.reset("e1") == {"r"}
        assert ledger.reset("e2") == {"r"}
        ledger.apply_report(done(job), 0.0)

        assert nothing_to_store(ledger, "r", 4)
        assert ledger.generation("r") == 1
        assert ledger.reset("e3") == set()
        ledger.begin_generation("r")
        assert store(ledger, "r", 1).epoch == "e3"

    def test_after_a_refused_one_nothing_is_stored_or_hit_until_one_succeeds(self):
        ledger = make_ledger("r")
        ledger.reset("e1", refused=True)
        ledger.begin_generation("s")
        assert nothing_to_store(ledger, "s", 4)
        assert (ledger.mute, ledger.may_hit("s"), ledger.wants_store("s", 4, 0.0)) == (True, False, False)
        assert ledger.snapshot().declined["mute"] == 1

        ledger.reset("e2")
        ledger.begin_generation("s")
        assert (ledger.mute, ledger.may_hit("s"), ledger.wants_store("s", 4, 0.0)) == (False, True, True)
        assert store(ledger, "s", 1).epoch == "e2"


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


@pytest.mark.parametrize("seed", range(20))
def test_counts_agree_with_a_naive_twin_on_random_runs(seed):
    """The obvious version: a list of (job, block) references and a set of reports per job."""
    rng = random.Random(seed)
    ledger = make_ledger(num_ranks=2, max_pinned_blocks=12)
    references: list[tuple[int, int]] = []
    owed: dict[int, set[int]] = {}
    jobs: dict[int, Job] = {}
    for step in range(300):
        request = rng.choice("abc")
        choice = rng.random()
        if choice < 0.2 or ledger.generation(request) is None:
            ledger.begin_generation(request)
        elif choice < 0.6:
            table = rng.sample(range(100), 6)
            names = [rng.randbytes(8) for _ in table]
            job = ledger.emit_store(request, rng.randint(0, 6), table, names, now=float(step))
            if job is not None:
                jobs[job.job_id] = job
                owed[job.job_id] = {0, 1}
                references += [(job.job_id, b) for b in job.block_ids]
        elif owed:
            job_id = rng.choice(sorted(owed))
            rank = rng.choice(sorted(owed[job_id]))
            report = rng.choice([done(jobs[job_id], rank), bad(jobs[job_id], rank, Result.FAILED, 0)])
            settled = ledger.apply_report(report, float(step))
            owed[job_id].discard(rank)
            assert (settled is not None) == (not owed[job_id])
            if not owed[job_id]:
                del owed[job_id]
                references = [r for r in references if r[0] != job_id]
        pins = ledger.snapshot().pins
        assert pins.blocks == len({b for _, b in references}) <= 12
        assert pins.jobs == len({j for j, _ in references})
        assert ledger.has_open_jobs() == bool(owed)


def test_pending_frees_are_of_blocks_that_hang_on_nothing_but_our_pins():
    ledger = make_ledger("r")
    references = dict.fromkeys([*BLOCKS, *OTHER_BLOCKS], 0)
    assert not ledger.has_pending_frees(references.__getitem__, 0.0)
    load(ledger, "r", **OTHER)
    assert not ledger.has_pending_frees(references.__getitem__, 0.0)
    ledger.begin_generation("r")
    job = store(ledger, "r", 2)
    references[10] = references[11] = 2  # the request's and ours
    assert not ledger.has_pending_frees(references.__getitem__, 0.0)
    references[11] = 1  # preempted: only ours is left
    assert ledger.has_pending_frees(references.__getitem__, 0.0)
    ledger.apply_report(done(job), 0.0)
    assert not ledger.has_pending_frees(references.__getitem__, 0.0)


STALLS: dict[str, tuple[Callable[[Ledger, Job], object], float]] = {
    "nothing else happens": (lambda ledger, job: None, 100.0),
    "a rank reports": (lambda ledger, job: ledger.apply_report(done(job), 109.0), 109.0),
    "a rank fails": (lambda ledger, job: ledger.apply_report(bad(job, 0, Result.FAILED), 109.0), 109.0),
    "more is pinned": (lambda ledger, job: store(ledger, "r", 2, now=109.0), 100.0),
    "a load begins": (lambda ledger, job: load(ledger, "s", now=109.0, **OTHER), 100.0),
    "a load ends": (lambda ledger, job: ledger.apply_report(done(load(ledger, "s", **OTHER)), 109.0), 100.0),
    "a new busy period": (
        lambda ledger, job: [
            *(ledger.apply_report(done(job, rank), 109.0) for rank in (0, 1)),
            store(ledger, "r", 2, now=200.0),
        ],
        200.0,
    ),
}
"""What happens after the first pins at 100 s, and since when a stall is counted then."""


@pytest.mark.parametrize("what", STALLS)
def test_vllm_waits_for_frees_no_longer_than_the_stall_timeout_without_a_store_report(what):
    happens, since = STALLS[what]
    ledger = make_ledger("r", "s", num_ranks=2)
    happens(ledger, store(ledger, "r", 1, now=100.0))
    ours = ledger.view().pins.__getitem__
    assert ledger.has_pending_frees(ours, since + 10.0)
    assert not ledger.has_pending_frees(ours, since + 10.1)
