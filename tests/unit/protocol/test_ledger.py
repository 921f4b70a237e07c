"""The scheduler side's ledger: what must hold for pins, generations, reports and retries."""

import copy
import random

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import Decline, Job, Ledger, Load, Report, Result
from tests.support.ledgers import BLOCKS, HASHES, bad, done, store


def make_ledger(*, num_ranks: int = 2, max_pinned_blocks: int = 100, max_store_attempts: int = 3) -> Ledger:
    return Ledger(
        num_ranks=num_ranks,
        max_pinned_blocks=max_pinned_blocks,
        max_store_attempts=max_store_attempts,
        stall_timeout_s=10.0,
        retry_backoff_s=1.0,
    )


class TestPins:
    def test_released_tail_first_when_every_rank_has_reported(self):
        ledger = make_ledger()
        ledger.begin_generation("r")
        job = store(ledger, "r", 3)

        assert ledger.apply_report(done(job, 1), 0.0) is None
        assert ledger.snapshot().pins.blocks == 3
        settled = ledger.apply_report(done(job, 0), 0.0)

        assert settled is not None
        assert settled.released == (12, 11, 10)
        assert ledger.snapshot().pins.blocks == 0

    def test_kept_when_the_generation_ends_before_the_reports(self):
        ledger = make_ledger()
        ledger.begin_generation("r")
        job = store(ledger, "r", 2)
        ledger.end_generation("r")

        assert ledger.snapshot().pins.blocks == 2
        assert ledger.has_open_jobs()
        ledger.apply_report(done(job, 0), 0.0)
        settled = ledger.apply_report(done(job, 1), 0.0)

        assert settled is not None
        assert not settled.current
        assert settled.released == (11, 10)

    @pytest.mark.parametrize("result", [r for r in Result if r is not Result.DONE])
    def test_released_whatever_the_result(self, result):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = store(ledger, "r", 2)

        settled = ledger.apply_report(bad(job, 0, result), 0.0)

        assert settled is not None
        assert settled.released == (11, 10)
        assert not ledger.has_open_jobs()

    def test_only_the_new_blocks_of_a_step_are_pinned(self):
        ledger = make_ledger()
        ledger.begin_generation("r")
        store(ledger, "r", 3)

        job = store(ledger, "r", 5)

        assert job.block_ids == (13, 14)

    def test_budget_makes_blocks_wait_in_the_tracker(self):
        ledger = make_ledger(num_ranks=1, max_pinned_blocks=2)
        ledger.begin_generation("r")
        first = store(ledger, "r", 5)
        assert first.block_ids == (10, 11)
        assert ledger.emit_store("r", 5, BLOCKS, HASHES, now=0.0) is None
        assert ledger.snapshot().declined[Decline.BUDGET.value] == 2

        ledger.apply_report(done(first, 0), 0.0)

        assert store(ledger, "r", 5).block_ids == (12, 13)

    def test_a_block_shared_by_two_requests_is_not_stored_twice(self):
        ledger = make_ledger()
        ledger.begin_generation("a")
        ledger.begin_generation("b")
        store(ledger, "a", 3)

        assert store(ledger, "b", 5).block_ids == (13, 14)

    def test_a_block_left_to_another_job_is_stored_after_that_job_failed(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("a")
        ledger.begin_generation("b")
        first = store(ledger, "a", 1)
        assert ledger.emit_store("b", 1, BLOCKS, HASHES, now=0.0) is None
        ledger.end_generation("a")
        ledger.apply_report(bad(first, 0, Result.DROPPED), 0.5)

        assert store(ledger, "b", 1, now=2.0).block_ids == (10,)


class TestReports:
    def test_every_refusal_leaves_the_ledger_as_it_was(self):
        ledger = make_ledger()
        ledger.begin_generation("r")
        job = store(ledger, "r", 2)
        settled = store(ledger, "r", 3)
        for rank in (0, 1):
            ledger.apply_report(done(settled, rank), 0.0)
        ledger.apply_report(done(job, 0), 0.0)
        wrong = {
            "second report": done(job, 0),
            "already reported": done(settled, 0),
            "never emitted": Report(job_id=99, rank=0, result=Result.DONE),
            "unknown rank": done(job, 2),
            "outside the job": bad(job, 1, Result.FAILED, 2),
            "without a bad position": Report(job_id=job.job_id, rank=1, result=Result.FAILED),
            "with bad positions": bad(job, 1, Result.DONE, 0),
        }

        for message, report in wrong.items():
            before = ledger.snapshot()
            with pytest.raises(ProtocolError, match=message):
                ledger.apply_report(report, 1.0)
            assert ledger.snapshot() == before

        assert ledger.apply_report(done(job, 1), 1.0) is not None

    def test_worst_rank_decides_and_bad_blocks_are_the_union(self):
        ledger = make_ledger()
        ledger.begin_generation("r")
        job = store(ledger, "r", 3)
        ledger.apply_report(bad(job, 0, Result.FAILED, 2), 0.0)

        settled = ledger.apply_report(bad(job, 1, Result.REFUSED, 1), 0.0)

        assert settled is not None
        assert (settled.result, settled.bad) == (Result.FAILED, (1, 2))


class TestGenerations:
    def test_late_result_of_an_older_generation_changes_no_newer_tracker(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        old = store(ledger, "r", 2)
        ledger.begin_generation("r")
        new = store(ledger, "r", 4, blocks=[20, 21, 22, 23], hashes=HASHES[4:8])

        ledger.apply_report(bad(old, 0, Result.FAILED), 0.0)

        assert ledger.snapshot().retries == 0
        settled = ledger.apply_report(done(new, 0), 5.0)
        assert settled is not None
        assert settled.current

    def test_generation_numbers_are_never_repeated(self):
        ledger = make_ledger()
        numbers = [ledger.begin_generation("r") for _ in range(3)]
        assert numbers == sorted(set(numbers))


class TestRetry:
    def test_failed_blocks_are_issued_again_after_the_backoff_while_the_generation_lives(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = store(ledger, "r", 3)
        ledger.apply_report(bad(job, 0, Result.FAILED, 1), 10.0)

        assert not ledger.wants_store("r", 3, 10.5)
        assert ledger.wants_store("r", 3, 11.0)
        assert store(ledger, "r", 3, now=11.0).block_ids == (11,)

    def test_pressure_with_nothing_to_issue_keeps_its_probe_and_moves_the_frontier(self):
        ledger = make_ledger(num_ranks=1)
        for r in "ab":
            ledger.begin_generation(r)
        first = store(ledger, "a", 1)
        ledger.apply_report(bad(store(ledger, "a", 2), 0, Result.REFUSED), 0.0)

        assert ledger.emit_store("b", 1, BLOCKS, HASHES, now=1.5) is None  # another open job stores this block
        assert ledger.progress("b") == (1, (0,))
        ledger.apply_report(done(first, 0), 1.6)
        ledger.apply_report(bad(store(ledger, "a", 2, now=1.7), 0, Result.REFUSED), 1.8)
        assert ledger.emit_store("b", 1, BLOCKS, HASHES, now=9.0) is None  # stored by now
        assert ledger.progress("b") == (1, ())
        assert store(ledger, "a", 2, now=9.0).block_ids == (11,)  # the probe is still there

    def test_given_up_after_the_configured_attempts(self):
        ledger = make_ledger(num_ranks=1, max_store_attempts=2)
        ledger.begin_generation("r")
        for now in (0.0, 100.0):
            ledger.apply_report(bad(store(ledger, "r", 1, now=now), 0, Result.REFUSED), now)

        assert not ledger.wants_store("r", 1, 1000.0)
        assert ledger.snapshot().declined[Decline.ATTEMPTS.value] == 1

    def test_pressure_holds_back_everyone_then_lets_one_probe_through(self):
        ledger = make_ledger(num_ranks=1)
        for r in "ab":
            ledger.begin_generation(r)
        ledger.apply_report(bad(store(ledger, "a", 1), 0, Result.REFUSED), 0.0)
        b_blocks, b_hashes = [20, 21], HASHES[4:6]

        assert ledger.emit_store("b", 2, b_blocks, b_hashes, now=0.5) is None
        probe = ledger.emit_store("b", 1, b_blocks, b_hashes, now=1.5)
        assert probe is not None
        assert ledger.emit_store("b", 2, b_blocks, b_hashes, now=1.6) is None
        ledger.apply_report(done(probe, 0), 1.7)
        assert ledger.emit_store("b", 2, b_blocks, b_hashes, now=1.8) is not None


class TestLoads:
    def load(self, ledger: Ledger, request: str, *, sync: bool = False) -> Job:
        return ledger.emit_load(request, BLOCKS[:2], HASHES[:2], sync=sync, now=0.0)

    def test_nothing_is_stored_while_a_load_is_pending(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = self.load(ledger, "r")

        assert ledger.emit_store("r", 4, BLOCKS, HASHES, now=0.0) is None
        ledger.apply_report(done(job, 0), 0.0)

        assert store(ledger, "r", 4).block_ids == (12, 13)

    def test_recomputed_blocks_of_a_failed_async_load_are_stored_and_those_that_arrived_are_not(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = self.load(ledger, "r")
        ledger.apply_report(bad(job, 0, Result.FAILED, 1), 0.0)

        assert ledger.load_state("r") is Load.FAILED
        assert store(ledger, "r", 2).block_ids == (11,)

    def test_refused_load_uses_up_no_job_id(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = self.load(ledger, "r")
        with pytest.raises(ProtocolError, match="pending"):
            self.load(ledger, "r")

        ledger.begin_generation("r")
        assert self.load(ledger, "r").job_id == job.job_id + 1

    def test_failed_sync_load_taints_its_generation_and_whoever_shares_the_blocks(self):
        ledger = make_ledger(num_ranks=1)
        for r in ("loader", "sharer", "stranger"):
            ledger.begin_generation(r)
        job = self.load(ledger, "loader", sync=True)
        assert ledger.emit_store("sharer", 4, BLOCKS, HASHES, now=0.0) is None
        stranger = [30, 31], [b"x" * 8, b"y" * 8]
        assert ledger.emit_store("stranger", 2, *stranger, now=0.0) is not None

        ledger.apply_report(bad(job, 0, Result.FAILED, 0), 0.0)

        assert ledger.load_state("loader") is Load.TAINTED
        assert ledger.load_state("sharer") is Load.TAINTED
        assert not ledger.wants_store("sharer", 8, 100.0)

    def test_sharer_stores_after_the_sync_load_has_arrived(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("loader")
        ledger.begin_generation("sharer")
        job = self.load(ledger, "loader", sync=True)
        ledger.emit_store("sharer", 4, BLOCKS, HASHES, now=0.0)

        ledger.apply_report(done(job, 0), 0.0)

        assert store(ledger, "sharer", 4).block_ids == (12, 13)

    def test_generation_that_loads_across_a_reset_stores_nothing(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        job = self.load(ledger, "r")

        assert ledger.reset("e1") == {"r"}
        ledger.apply_report(done(job, 0), 0.0)

        assert ledger.emit_store("r", 4, BLOCKS, HASHES, now=0.0) is None
        ledger.begin_generation("r")
        assert store(ledger, "r", 1).epoch == "e1"


class TestPendingFrees:
    def test_true_only_while_a_block_hangs_on_nothing_but_pins_and_reports_may_come(self):
        ledger = make_ledger(num_ranks=1)
        ledger.begin_generation("r")
        references = dict.fromkeys(BLOCKS, 0)
        assert not ledger.has_pending_frees(references.__getitem__, 0.0)
        job = store(ledger, "r", 2, now=100.0)
        references[10] = references[11] = 2  # the request's and ours
        assert not ledger.has_pending_frees(references.__getitem__, 100.0)

        references[11] = 1  # preempted: only ours is left

        assert ledger.has_pending_frees(references.__getitem__, 109.0)
        assert not ledger.has_pending_frees(references.__getitem__, 111.0)
        ledger.apply_report(done(job, 0), 112.0)
        assert not ledger.has_pending_frees(references.__getitem__, 112.0)


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


def test_jobs_share_nothing_with_the_lists_they_were_made_from():
    ledger = make_ledger()
    ledger.begin_generation("r")
    table, names = copy.copy(BLOCKS), copy.copy(HASHES)
    job = store(ledger, "r", 2, blocks=table, hashes=names)
    table[0] = 99
    names[0] = b"other"
    assert (job.block_ids[0], job.hashes[0]) == (10, HASHES[0])
