"""Transfer threads: one lane for stores, one for loads, so that loads overtake stores and stores never wait for
loads.

A lane that dies says so and is restarted, a few times in a row; while it is down it is not `alive`, and nothing may be
queued for it.
"""

import threading
from collections.abc import Callable

from kvledger.protocol import Job, Kind
from kvledger.worker.desk import Desk

RESTARTS = 3
"""Most restarts in a row; a job that ran to its end begins a new row."""
RESTART_PAUSE_S = 1.0
START_TIMEOUT_S = 30.0
"""Longest wait for `prepare` at start; a lane that takes longer is down until it has come back."""

Lost = Callable[[Kind, Job | None, BaseException, bool], None]
"""Kind of the lane, the job it was in, why it died, whether it is over for good."""


class Lane:
    """Runs this rank's jobs of one kind, one after the other, in job-id order.

    `prepare` runs in the thread before the first job and after each death. `lost` is called in the thread when it has
    died of an exception, with the lane no longer alive: it reports the job that the lane was in and those queued.
    """

    def __init__(
        self, kind: Kind, desk: Desk, *, run: Callable[[Job], None], prepare: Callable[[], None], lost: Lost
    ) -> None:
        self.kind = kind
        self._desk = desk
        self._run = run
        self._prepare = prepare
        self._lost = lost
        self._stop = threading.Event()
        self._settled = threading.Event()  # the first `prepare` is over
        self._job: Job | None = None
        self._ready = False
        self._deaths = 0
        self._thread = threading.Thread(target=self._loop, name=f"kvledger-{kind.value}", daemon=True)

    def start(self) -> bool:
        """Start the thread and wait until it is prepared, at most `START_TIMEOUT_S`; whether it is alive."""
        self._thread.start()
        self._settled.wait(START_TIMEOUT_S)
        return self.alive

    def _loop(self) -> None:
        while True:
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 - whatever ends the thread, its jobs must be reported
                over = self._die(error)
                if over or self._stop.wait(RESTART_PAUSE_S):
                    return
            else:
                return

    def _work(self) -> None:
        """Prepare, and run jobs until the lane is stopped."""
        self._prepare()
        self._ready = True
        self._settled.set()
        while (job := self._desk.next_job(self.kind, self._stop.is_set)) is not None:
            self._job = job
            self._run(job)
            self._job = None
            self._deaths = 0

    def _die(self, error: BaseException) -> bool:
        """Not alive first, then report: whoever queues a job and finds the lane alive afterwards is reported here."""
        self._ready = False
        self._deaths += 1
        over = self._deaths > RESTARTS
        try:
            self._lost(self.kind, self._job, error, over)
        finally:
            self._job = None
            self._settled.set()
        return over

    @property
    def alive(self) -> bool:
        """Whether the thread takes jobs."""
        return self._ready and self._thread.is_alive()

    @property
    def running(self) -> int | None:
        """The job that the thread is in, given up or not."""
        job = self._job
        return None if job is None else job.job_id

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its current job and wait; False if it is still inside a call."""
        self._stop.set()
        self._desk.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
