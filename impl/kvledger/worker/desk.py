"""The rank's ledger behind one lock, with a condition that transfer threads and a waiting forward share."""

import threading
import time
from collections.abc import Callable

from kvledger.errors import StuckCopyError
from kvledger.protocol import Job, Kind, RankLedger, RankSnapshot, RankView, Report, Result


class Desk:
    """Thread-safe face of `RankLedger`; adds the clock (seconds, monotonic)."""

    def __init__(self, ledger: RankLedger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._changed = threading.Condition()
        self._quarantined: set[int] = set()

    def accept(self, job: Job) -> None:
        """See `RankLedger.accept`."""
        with self._changed:
            self._ledger.accept(job)
            self._changed.notify_all()

    def next_job(self, kind: Kind, stopping: Callable[[], bool]) -> Job | None:
        """Wait for a job of this kind and start it; None when `stopping()`."""
        with self._changed:
            while not stopping():
                job = self._ledger.start(kind, self._clock())
                if job is not None:
                    return job
                self._changed.wait(timeout=1.0)
            return None

    def wake(self) -> None:
        """Make waiting threads look at their stop flag."""
        with self._changed:
            self._changed.notify_all()

    def proceed(self, job_id: int, *, guarded: bool = False) -> bool:
        """See `RankLedger.proceed`."""
        with self._changed:
            return self._ledger.proceed(job_id, self._clock(), guarded=guarded)

    def finish(self, job_id: int, result: Result, bad: tuple[int, ...]) -> bool:
        """See `RankLedger.finish`."""
        with self._changed:
            done = self._ledger.finish(job_id, result, bad)
            self._changed.notify_all()
            return done

    def quarantine(self, job_id: int, bad: tuple[int, ...]) -> bool:
        """See `RankLedger.quarantine`."""
        with self._changed:
            held = self._ledger.quarantine(job_id, bad, self._clock())
            if held:
                self._quarantined.add(job_id)
            return held

    def drop(self, job: Job) -> None:
        """See `RankLedger.drop`."""
        with self._changed:
            self._ledger.drop(job)

    def cancel(self, job_id: int) -> bool:
        """See `RankLedger.cancel`."""
        with self._changed:
            return self._ledger.cancel(job_id)

    def give_up(self, job_id: int) -> bool:
        """See `RankLedger.give_up`."""
        with self._changed:
            return self._ledger.give_up(job_id)

    def drop_queued(self, kind: Kind) -> int:
        """See `RankLedger.drop_queued`."""
        with self._changed:
            return self._ledger.drop_queued(kind)

    def wait_over(self, job_id: int, timeout_s: float, copy_timeout_s: float) -> bool:
        """Wait until the job is reported, at most `timeout_s`; then give it up. False if it had to be given up.

        A stage that is writing KV blocks at the deadline is waited for, because the blocks are not ours to give back
        meanwhile: it is a local copy, and ends within milliseconds unless the device hangs.

        Raises:
            StuckCopyError: the local copy has not ended `copy_timeout_s` after the deadline.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            while self._ledger.is_open(job_id):
                left = deadline - self._clock()
                if left <= 0 and (self._ledger.cancel(job_id) or self._ledger.give_up(job_id)):
                    return False
                if left <= -copy_timeout_s:
                    raise StuckCopyError(job_id, timeout_s + copy_timeout_s)
                self._changed.wait(timeout=max(left, 0.01))
            return True

    def expire(self) -> list[int]:
        """See `RankLedger.expire`. Answers only the jobs whose call never came back, not the quarantines that are over."""
        with self._changed:
            over = self._ledger.expire(self._clock())
            stuck = [job_id for job_id in over if job_id not in self._quarantined]
            self._quarantined.difference_update(over)
            return stuck

    def wait_report(self, timeout_s: float) -> None:
        """Wait until a report can be taken or no job is open, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ledger.has_reports() or self._ledger.is_idle(), timeout_s)

    def take_reports(self) -> list[Report]:
        """See `RankLedger.take_reports`."""
        with self._changed:
            return self._ledger.take_reports()

    def is_idle(self) -> bool:
        """See `RankLedger.is_idle`."""
        with self._changed:
            return self._ledger.is_idle()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job is open, at most `timeout_s`."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while not self._ledger.is_idle():
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(timeout=left)
            return True

    def view(self) -> RankView:
        """See `RankLedger.view`."""
        with self._changed:
            return self._ledger.view()

    def snapshot(self) -> RankSnapshot:
        """See `RankLedger.snapshot`."""
        with self._changed:
            return self._ledger.snapshot()
