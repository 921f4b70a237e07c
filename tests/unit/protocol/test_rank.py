"""The rank's ledger: what each call answers and changes, when a bound has passed, and one report per job on every path."""

import functools
import random
from collections.abc import Callable

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import Kind, RankSnapshot, Report, Result
from kvledger.protocol import rank as rank_module
from tests.support.ledgers import make_job, make_rank

UNKNOWN = 9
"""A job that no rank of these tests has been told."""


def report(result: Result, bad: tuple[int, ...] = (), job_id: int = 1) -> list[Report]:
    return [Report(job_id=job_id, rank=3, result=result, bad=bad)]


class TestStart:
    def test_takes_the_jobs_of_a_kind_in_job_id_order(self):
        rank = make_rank()
        for job_id, kind in ((3, Kind.STORE), (2, Kind.LOAD), (1, Kind.STORE)):
            rank.accept(make_job(job_id, kind))
        started = [rank.start(kind, 0.0) for kind in (Kind.LOAD, Kind.STORE, Kind.STORE, Kind.STORE)]
        assert [job and job.job_id for job in started] == [2, 1, 3, None]

    def test_of_a_given_job_overtakes_the_queue(self):
        rank = make_rank(1, 2)
        assert rank.start_job(2, 5.0)
        assert rank.expire(14.9) == []
        assert rank.start(Kind.STORE, 0.0) == make_job(1)
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

    @pytest.mark.parametrize("job_id", [1, UNKNOWN], ids=["queued", "unknown"])
    def test_a_job_that_does_not_run_is_told_so_and_stays_as_it_is(self, job_id):
        rank = make_rank(1)
        assert not rank.proceed(job_id, 0.0)
        assert not rank.quarantine(job_id, (0,), 0.0)
        assert not rank.give_up(job_id)
        assert rank.snapshot() == RankSnapshot(queued=1, running=0, quarantined=0, unread_reports=0)

    def test_progress_renews_the_bound(self):
        rank = make_rank(1, running=True)
        assert rank.proceed(1, 9.0)
        assert rank.expire(18.9) == []
        assert rank.expire(19.0) == [1]

    def test_a_stage_that_writes_blocks_is_not_given_up_halfway(self):
        rank = make_rank(1, running=True)
        rank.proceed(1, 0.0, guarded=True)
        assert rank.expire(1000.0) == []
        assert not rank.give_up(1)
        rank.proceed(1, 1000.0)
        assert rank.expire(1009.9) == []
        assert rank.expire(1010.0) == [1]

    def test_a_job_that_was_given_up_may_touch_nothing_and_reports_nothing_more(self):
        """Of none of its blocks is anything known."""
        rank = make_rank(1, running=True)
        assert rank.give_up(1) is True
        assert not rank.give_up(1)
        assert not rank.proceed(1, 10.0)
        assert not rank.finish(1, Result.DONE)
        assert not rank.quarantine(1, (0,), 10.0)
        assert rank.take_reports() == report(Result.INDETERMINATE, (0, 1))


class TestQuarantine:
    def test_is_reported_only_after_its_bound_and_the_job_runs_no_more(self):
        rank = make_rank(1, running=True)
        rank.quarantine(1, (0,), 5.0)
        assert not rank.proceed(1, 5.0)
        assert not rank.quarantine(1, (0, 1), 50.0)
        assert not rank.give_up(1)
        assert rank.expire(104.9) == []
        assert rank.take_reports() == []
        assert rank.expire(105.0) == [1]
        assert rank.take_reports() == report(Result.INDETERMINATE, (0,))

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

    def test_of_the_queued_jobs_of_a_kind_leaves_those_that_run_and_the_other_kind(self):
        rank = make_rank(1, running=True)
        for job_id, kind in ((2, Kind.STORE), (3, Kind.STORE), (4, Kind.LOAD)):
            rank.accept(make_job(job_id, kind))
        assert rank.drop_queued(Kind.STORE) == 2
        assert [r.job_id for r in rank.take_reports()] == [2, 3]
        assert rank.is_open(1)
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


def test_reports_are_handed_out_once_in_the_order_in_which_the_jobs_ended():
    rank = make_rank(1, 2, running=True)
    rank.finish(2, Result.DONE)
    rank.finish(1, Result.DONE)
    assert rank.take_reports() == [*report(Result.DONE, job_id=2), *report(Result.DONE, job_id=1)]
    assert rank.take_reports() == []


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


def test_a_late_result_of_a_job_that_is_forgotten_is_refused_and_changes_nothing(monkeypatch):
    """A rank remembers 4,096 reported jobs; of older ones it cannot say more than this."""
    assert rank_module.RETIRED_REMEMBERED == 4096
    monkeypatch.setattr(rank_module, "RETIRED_REMEMBERED", 1)
    rank = make_rank(1, 2, running=True)
    rank.give_up(1)
    assert rank.finish(1, Result.DONE) is False
    rank.give_up(2)
    before = rank.snapshot(), rank.view()
    with pytest.raises(ProtocolError, match="or ended long ago"):
        rank.finish(1, Result.DONE)
    assert (rank.snapshot(), rank.view()) == before


@pytest.mark.parametrize("seed", range(20))
def test_any_input_is_accepted_or_refused_without_change_and_each_job_reports_once(seed):
    rng = random.Random(seed)
    rank = make_rank()
    told: set[int] = set()
    reports: list[Report] = []
    now = 0.0
    for _ in range(400):
        now += rng.choice([0.0, 1.0, 30.0])
        job_id = rng.randint(1, 12)
        actions: list[Callable[[], object]] = [
            functools.partial(rank.accept, make_job(job_id)),
            functools.partial(rank.start, Kind.STORE, now),
            functools.partial(rank.finish, job_id, Result.FAILED, (0,)),
            functools.partial(rank.quarantine, job_id, (0,), now),
            functools.partial(rank.cancel, job_id),
            functools.partial(rank.proceed, job_id, now),
            functools.partial(rank.expire, now),
        ]
        before = rank.snapshot()
        chosen = rng.choice(actions)
        try:
            chosen()
        except ProtocolError:
            assert rank.snapshot() == before
        told |= rank.view().lives.keys()
        if rng.random() < 0.3:
            reports += rank.take_reports()
    rank.drop_queued(Kind.STORE)
    while not rank.is_idle():
        now += 1000.0
        rank.expire(now)
    reports += rank.take_reports()
    assert sorted(r.job_id for r in reports) == sorted(told)
