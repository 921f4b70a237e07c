"""The rank's ledger: exactly one report per job, on every path."""

import random

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import RANK_LIFE, Job, Kind, Life, RankLedger, Report, Result


def make_job(job_id: int, kind: Kind = Kind.STORE) -> Job:
    return Job(job_id=job_id, kind=kind, generation=1, block_ids=(1, 2), hashes=(b"a", b"b"))


def make_rank() -> RankLedger:
    return RankLedger(rank=3, stuck_after_s=10.0, quarantine_s=100.0)


def test_jobs_of_a_kind_start_in_job_id_order():
    rank = make_rank()
    for job_id, kind in ((1, Kind.STORE), (2, Kind.LOAD), (3, Kind.STORE)):
        rank.accept(make_job(job_id, kind))

    assert [rank.start(Kind.LOAD, 0.0).job_id, rank.start(Kind.STORE, 0.0).job_id] == [2, 1]
    assert rank.start(Kind.STORE, 0.0).job_id == 3
    assert rank.start(Kind.STORE, 0.0) is None


def test_a_report_is_handed_out_once():
    rank = make_rank()
    rank.accept(make_job(1))
    rank.start(Kind.STORE, 0.0)
    rank.finish(1, Result.DONE)

    assert rank.take_reports() == [Report(job_id=1, rank=3, result=Result.DONE)]
    assert rank.take_reports() == []
    assert rank.is_idle()


def test_job_told_twice_is_refused_also_after_it_was_reported():
    rank = make_rank()
    rank.accept(make_job(1))
    with pytest.raises(ProtocolError, match="told twice"):
        rank.accept(make_job(1))
    rank.cancel(1)
    with pytest.raises(ProtocolError, match="told twice"):
        rank.accept(make_job(1))


def test_quarantined_job_is_reported_only_after_its_bound():
    rank = make_rank()
    rank.accept(make_job(1))
    rank.start(Kind.STORE, 0.0)
    rank.quarantine(1, (1,), 5.0)

    assert rank.expire(104.0) == []
    assert rank.take_reports() == []
    assert rank.expire(105.0) == [1]
    assert rank.take_reports() == [Report(job_id=1, rank=3, result=Result.INDETERMINATE, bad=(1,))]


def test_job_that_was_given_up_may_touch_nothing_and_reports_nothing_more():
    rank = make_rank()
    rank.accept(make_job(1))
    rank.start(Kind.STORE, 0.0)
    rank.expire(10.0)

    assert not rank.proceed(1, 10.0)
    assert not rank.finish(1, Result.DONE)
    assert not rank.quarantine(1, (0,), 10.0)
    assert [r.result for r in rank.take_reports()] == [Result.INDETERMINATE]


def test_progress_renews_the_bound():
    rank = make_rank()
    rank.accept(make_job(1))
    rank.start(Kind.STORE, 0.0)
    assert rank.proceed(1, 9.0)
    assert rank.expire(18.0) == []
    assert rank.expire(19.0) == [1]


def test_stage_that_writes_blocks_is_not_given_up_halfway():
    rank = make_rank()
    rank.accept(make_job(1, Kind.LOAD))
    rank.start(Kind.LOAD, 0.0)
    rank.proceed(1, 0.0, guarded=True)

    assert rank.expire(1000.0) == []
    assert not rank.give_up(1)
    rank.proceed(1, 1000.0)
    assert rank.give_up(1)


def test_only_queued_jobs_are_dropped():
    rank = make_rank()
    rank.accept(make_job(1))
    rank.accept(make_job(2))
    rank.start(Kind.STORE, 0.0)

    assert not rank.cancel(1)
    assert rank.drop_queued(Kind.LOAD) == 0
    assert rank.drop_queued(Kind.STORE) == 1
    assert rank.take_reports() == [Report(job_id=2, rank=3, result=Result.DROPPED, bad=(0, 1))]


def test_dropping_a_running_job_is_refused_and_changes_nothing():
    rank = make_rank()
    job = make_job(1)
    rank.accept(job)
    rank.start(Kind.STORE, 0.0)
    before = rank.snapshot()
    with pytest.raises(ProtocolError, match="running"):
        rank.drop(job)
    assert rank.snapshot() == before


def test_finish_of_a_job_that_never_ran_here_is_refused():
    rank = make_rank()
    with pytest.raises(ProtocolError, match="does not run here"):
        rank.finish(7, Result.DONE)


def test_every_life_but_the_last_has_a_way_on():
    assert {life for life, _ in RANK_LIFE} == set(Life) - {Life.REPORTED}


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
        action = rng.choice(
            [
                lambda j=job_id: (rank.accept(make_job(j)), told.add(j)),
                lambda t=now: rank.start(Kind.STORE, t),
                lambda j=job_id: rank.finish(j, Result.FAILED, (0,)),
                lambda j=job_id, t=now: rank.quarantine(j, (0,), t),
                lambda j=job_id: rank.cancel(j),
                lambda j=job_id, t=now: rank.proceed(j, t),
                lambda t=now: rank.expire(t),
            ]
        )
        before = rank.snapshot()
        try:
            action()
        except ProtocolError:
            assert rank.snapshot() == before
        if rng.random() < 0.3:
            reports += rank.take_reports()
    rank.drop_queued(Kind.STORE)
    while not rank.is_idle():
        now += 1000.0
        rank.expire(now)
    reports += rank.take_reports()
    assert sorted(r.job_id for r in reports) == sorted(told)
