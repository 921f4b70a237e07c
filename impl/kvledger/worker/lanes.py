"""Transfer threads: one lane for stores, one for loads, so that loads overtake stores and stores never wait for
loads."""

import logging
import threading
from collections.abc import Callable

from kvledger.protocol import Job, Kind
from kvledger.worker.desk import Desk

logger = logging.getLogger(__name__)


class Lane:
    """Runs this rank's jobs of one kind, one after the other, in job-id order."""

    def __init__(self, kind: Kind, desk: Desk, run: Callable[[Job], None], prepare: Callable[[], None]) -> None:
        self.kind = kind
        self._desk = desk
        self._run = run
        self._prepare = prepare
        self._stop = threading.Event()
        self._running: int | None = None
        self._thread = threading.Thread(target=self._loop, name=f"kvledger-{kind.value}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _loop(self) -> None:
        self._prepare()
        while (job := self._desk.next_job(self.kind, self._stop.is_set)) is not None:
            self._running = job.job_id
            self._run(job)
            self._running = None

    @property
    def running(self) -> int | None:
        """The job that the thread is in, given up or not."""
        return self._running

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its current job and wait; False if it is still inside a call."""
        self._stop.set()
        self._desk.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
