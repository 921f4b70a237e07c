"""A lane that dies is restarted a few times in a row, and whoever waits for it hears of it."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvledger.protocol import Job, Kind, RankLedger, Result
from kvledger.worker import lanes
from kvledger.worker.desk import Desk
from kvledger.worker.lanes import Lane

BOUND_S = 30.0


class Owner:
    """What a lane needs: a desk, jobs that succeed or raise, and a note of each death."""

    def __init__(self) -> None:
        self.desk = Desk(RankLedger(rank=0, stuck_after_s=60, quarantine_s=60))
        self.errors: dict[int, BaseException] = {}
        self.prepare: Callable[[], object] = lambda: None
        self.deaths: list[tuple[int | None, str, bool]] = []
        self.heard = threading.Semaphore(0)
        self.lane = Lane(Kind.STORE, self.desk, run=self.run, prepare=self.prepares, lost=self.lost)

    def prepares(self) -> None:
        self.prepare()

    def run(self, job: Job) -> None:
        if job.job_id in self.errors:
            raise self.errors[job.job_id]
        self.desk.finish(job.job_id, Result.DONE, ())

    def lost(self, kind: Kind, job: Job | None, error: BaseException, over: bool) -> None:
        assert not self.lane.alive
        self.deaths.append((None if job is None else job.job_id, type(error).__name__, over))
        if job is not None:
            self.desk.finish(job.job_id, Result.FAILED, (0,))
        self.desk.drop_queued(kind)
        self.heard.release()

    def do(self, job_id: int) -> Result:
        self.desk.accept(Job(job_id=job_id, kind=Kind.STORE, generation=1, block_ids=(1,), hashes=(b"h",)))
        assert self.desk.wait_idle(BOUND_S)
        return self.desk.take_reports()[0].result


@pytest.fixture
def owner(monkeypatch) -> Iterator[Owner]:
    monkeypatch.setattr(lanes, "RESTART_PAUSE_S", 0.01)
    made = Owner()
    yield made
    assert made.lane.stop(BOUND_S)
    assert not made.lane.alive


@pytest.mark.parametrize("error", [RuntimeError("broke"), SystemExit(1)], ids=lambda e: type(e).__name__)
def test_a_job_that_raises_outside_its_own_guard_ends_and_the_lane_goes_on(owner, error):
    owner.errors[1] = error
    assert owner.lane.start()
    assert owner.do(1) is Result.FAILED
    assert owner.do(2) is Result.DONE
    assert owner.deaths == [(1, type(error).__name__, False)]
    assert owner.lane.alive


def test_a_lane_that_cannot_be_prepared_is_not_alive_and_over_after_a_few_attempts(owner):
    empty: dict[str, object] = {}
    owner.prepare = lambda: empty["x"]
    assert not owner.lane.start()
    for _ in range(lanes.RESTARTS + 1):
        assert owner.heard.acquire(timeout=BOUND_S)
    owner.lane._thread.join(BOUND_S)
    assert not owner.lane.alive
    assert owner.deaths == [(None, "KeyError", False)] * lanes.RESTARTS + [(None, "KeyError", True)]


def test_a_job_that_runs_to_its_end_begins_a_new_row_of_restarts(owner):
    assert owner.lane.start()
    for job_id in range(1, 4 * lanes.RESTARTS, 2):
        owner.errors[job_id] = RuntimeError("broke")
        assert owner.do(job_id) is Result.FAILED
        assert owner.do(job_id + 1) is Result.DONE
    assert not any(over for _, _, over in owner.deaths)


def test_a_preparation_that_hangs_holds_the_start_no_longer_than_its_bound(owner, monkeypatch):
    monkeypatch.setattr(lanes, "START_TIMEOUT_S", 0.05)
    gate = threading.Event()
    owner.prepare = lambda: None if gate.wait(BOUND_S) else pytest.fail("the gate stayed closed")
    assert not owner.lane.start()
    gate.set()
    assert owner.do(1) is Result.DONE
    assert owner.lane.alive
