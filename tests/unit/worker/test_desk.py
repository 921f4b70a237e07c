"""The desk: a forward waits for its synchronous load, and every such wait ends."""

import threading
import time

import pytest

from kvledger.errors import StuckCopyError
from kvledger.protocol import Job, Kind, RankLedger, Result
from kvledger.worker.desk import Desk


@pytest.fixture
def running_load() -> Desk:
    """A desk whose load 1 has been started by its thread."""
    desk = Desk(RankLedger(rank=0, stuck_after_s=60, quarantine_s=60))
    desk.accept(Job(job_id=1, kind=Kind.LOAD, generation=1, block_ids=(4,), hashes=(b"h",), sync=True))
    started = desk.next_job(Kind.LOAD, lambda: False)
    assert started is not None
    return desk


def test_a_synchronous_load_whose_copy_never_ends_is_an_error_in_time(running_load):
    assert running_load.proceed(1, guarded=True)
    begun = time.monotonic()
    with pytest.raises(StuckCopyError, match=r"job 1: .*0\.3 s"):
        running_load.wait_over(1, timeout_s=0.1, copy_timeout_s=0.2)
    assert time.monotonic() - begun >= 0.3


def test_a_copy_that_ends_after_the_deadline_counts(running_load):
    assert running_load.proceed(1, guarded=True)
    waiting = threading.Thread(target=lambda: (late.wait(30), running_load.finish(1, Result.DONE, ())))
    late = threading.Event()
    waiting.start()
    threading.Timer(0.1, late.set).start()
    assert running_load.wait_over(1, timeout_s=0.01, copy_timeout_s=30)
    waiting.join(30)


def test_a_load_that_writes_nothing_yet_is_given_up_at_the_deadline(running_load):
    assert not running_load.wait_over(1, timeout_s=0.01, copy_timeout_s=30)
    assert not running_load.proceed(1)


def test_an_ended_quarantine_is_not_taken_for_a_call_that_is_stuck():
    now = [0.0]
    desk = Desk(RankLedger(rank=0, stuck_after_s=10, quarantine_s=10), clock=lambda: now[0])
    for job_id in (1, 2):
        desk.accept(Job(job_id=job_id, kind=Kind.STORE, generation=1, block_ids=(4,), hashes=(b"h",)))
        desk.next_job(Kind.STORE, lambda: False)
    assert desk.quarantine(1, (0,))
    now[0] = 10.0
    assert desk.expire() == [2]
    assert sorted(report.job_id for report in desk.take_reports()) == [1, 2]


def test_a_wait_for_a_report_ends_with_the_report(running_load):
    threading.Timer(0.05, lambda: running_load.finish(1, Result.DONE, ())).start()
    running_load.wait_report(30)
    assert [r.job_id for r in running_load.take_reports()] == [1]


def test_a_wait_for_a_report_is_bounded_and_none_without_a_job(running_load):
    running_load.wait_report(0.01)
    assert running_load.take_reports() == []
    running_load.finish(1, Result.DONE, ())
    running_load.take_reports()
    begun = time.monotonic()
    running_load.wait_report(30)
    assert time.monotonic() - begun < 10
