"""The rank's ledger, call by call: what each answers, what it changes, and when a bound has passed."""

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import Job, Kind, RankLedger, RankSnapshot, Report, Result
from kvledger.protocol import rank as rank_module


def make_job(job_id: int, kind: Kind = Kind.STORE) -> Job:
    return Job(job_id=job_id, kind=kind, generation=1, block_ids=(1, 2), hashes=(b"a", b"b"))


def make_rank(*jobs: int, running: bool = False) -> RankLedger:
    """A rank that has been told these store jobs and, if asked, has started them at time 0."""
    rank = RankLedger(rank=3, stuck_after_s=10.0, quarantine_s=100.0)
    for job_id in jobs:
        rank.accept(make_job(job_id))
        if running:
            rank.start(Kind.STORE, 0.0)
    return rank


def report(result: Result, bad: tuple[int, ...] = (), job_id: int = 1) -> list[Report]:
    return [Report(job_id=job_id, rank=3, result=result, bad=bad)]


UNKNOWN = 9
"""A job that no rank of these tests has been told."""


class TestStart:
    def test_of_a_given_job_overtakes_the_queue(self):
        rank = make_rank(1, 2)
        assert rank.start_job(2, 5.0)
        assert rank.expire(14.9) == []
        assert rank.start(Kind.STORE, 0.0).job_id == 1
        assert rank.expire(15.0) == [1, 2]

    def test_of_a_given_job_only_if_it_is_queued(self):
        rank = make_rank(1, running=True)
        assert not rank.start_job(1, 0.0)
        assert not rank.start_job(UNKNOWN, 0.0)

    def test_sets_the_bound_of_the_call(self):
        rank = make_rank(1)
        rank.start(Kind.STORE, 5.0)
        assert rank.expire(14.9) == []
        assert rank.expire(15.0) == [1]
        assert rank.take_reports() == report(Result.INDETERMINATE, (0, 1))

    def test_jobs_that_wait_have_no_bound(self):
        assert make_rank(1).expire(1e9) == []


class TestRunning:
    def test_each_call_answers_whether_the_job_still_ran(self):
        rank = make_rank(1, 2, running=True)
        assert rank.proceed(1, 0.0) is True
        assert rank.finish(1, Result.FAILED, (1,)) is True
        assert rank.quarantine(2, (0,), 0.0) is True
        assert rank.take_reports() == report(Result.FAILED, (1,))

    def test_a_quarantined_job_runs_no_more(self):
        rank = make_rank(1, running=True)
        rank.quarantine(1, (0,), 0.0)
        assert not rank.proceed(1, 0.0)
        assert not rank.quarantine(1, (0, 1), 50.0)
        assert not rank.give_up(1)
        assert rank.expire(100.0) == [1]
        assert rank.take_reports() == report(Result.INDETERMINATE, (0,))

    @pytest.mark.parametrize("job_id", [1, UNKNOWN], ids=["queued", "unknown"])
    def test_a_job_that_does_not_run_is_told_so_and_stays_as_it_is(self, job_id):
        rank = make_rank(1)
        assert not rank.proceed(job_id, 0.0)
        assert not rank.quarantine(job_id, (0,), 0.0)
        assert not rank.give_up(job_id)
        assert rank.snapshot() == RankSnapshot(queued=1, running=0, quarantined=0, unread_reports=0)

    def test_giving_up_says_that_nothing_is_known_of_any_block(self):
        rank = make_rank(1, running=True)
        assert rank.give_up(1) is True
        assert rank.take_reports() == report(Result.INDETERMINATE, (0, 1))
        assert not rank.give_up(1)

    def test_a_guarded_stage_ends_with_the_next_stage(self):
        rank = make_rank(1, running=True)
        rank.proceed(1, 0.0, guarded=True)
        assert rank.expire(1000.0) == []
        rank.proceed(1, 1000.0)
        assert rank.expire(1009.9) == []
        assert rank.expire(1010.0) == [1]

    def test_a_quarantine_ends_at_its_bound_also_after_a_guarded_stage(self):
        rank = make_rank(1, running=True)
        rank.proceed(1, 0.0, guarded=True)
        rank.quarantine(1, (0,), 0.0)
        assert rank.expire(99.9) == []
        assert rank.expire(100.0) == [1]


class TestDrop:
    def test_of_a_job_that_was_never_told(self):
        rank = make_rank()
        rank.drop(make_job(1))
        assert rank.take_reports() == report(Result.DROPPED, (0, 1))
        assert rank.is_idle()

    def test_of_a_queued_job(self):
        rank = make_rank(1)
        assert rank.cancel(1) is True
        assert rank.take_reports() == report(Result.DROPPED, (0, 1))

    @pytest.mark.parametrize("job_id", [1, UNKNOWN], ids=["running", "unknown"])
    def test_cancelling_anything_else_changes_nothing(self, job_id):
        rank = make_rank(1, running=True)
        assert rank.cancel(job_id) is False
        assert rank.snapshot() == RankSnapshot(queued=0, running=1, quarantined=0, unread_reports=0)

    def test_of_a_kind_leaves_the_other_kind(self):
        rank = make_rank(1, 2)
        rank.accept(make_job(4, Kind.LOAD))
        assert rank.drop_queued(Kind.STORE) == 2
        assert [r.job_id for r in rank.take_reports()] == [1, 2]
        assert rank.is_open(4)
        assert rank.drop_queued(Kind.LOAD) == 1


def test_a_job_is_open_from_accept_to_report():
    rank = make_rank()
    assert not rank.is_open(1)
    rank.accept(make_job(1))
    assert rank.is_open(1)
    assert not rank.is_idle()
    rank.start(Kind.STORE, 0.0)
    rank.quarantine(1, (0,), 0.0)
    assert rank.is_open(1)
    rank.expire(100.0)
    assert not rank.is_open(1)
    assert rank.is_idle()


def test_reports_come_in_the_order_in_which_the_jobs_ended():
    rank = make_rank(1, 2, running=True)
    rank.finish(2, Result.DONE)
    rank.finish(1, Result.DONE)
    assert [r.job_id for r in rank.take_reports()] == [2, 1]


def test_figures_count_the_jobs_of_each_life():
    rank = make_rank(1, 2, 3, running=True)
    for job_id in range(4, 8):
        rank.accept(make_job(job_id))
    rank.quarantine(1, (0,), 0.0)
    for job_id in (8, 9, 10):
        rank.drop(make_job(job_id))
    assert rank.snapshot() == RankSnapshot(queued=4, running=2, quarantined=1, unread_reports=3)


def test_reported_jobs_are_remembered_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(rank_module, "RETIRED_REMEMBERED", 2)
    rank = make_rank()
    for job_id in (1, 2, 3):
        rank.drop(make_job(job_id))

    for job_id in (2, 3):
        with pytest.raises(ProtocolError, match="told twice"):
            rank.accept(make_job(job_id))
    rank.accept(make_job(1))
    assert rank.is_open(1)
