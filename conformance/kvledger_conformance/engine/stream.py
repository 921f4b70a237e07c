"""A rank's compute stream: forwards that have been launched and have not run yet, and events recorded behind them.

With two steps in flight, the hooks of a step are over long before its forward has written a byte. The harness runs
forwards when it likes, in order; whoever waits for an event in another thread sleeps until then, and the main thread,
which is where hooks run, makes the stream catch up instead.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvledger_conformance.store.transfer import HOLD_TIMEOUT_S


class Stream:
    """Launched work of one rank, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._main = threading.get_ident()
        self._over = False
        self.launched = 0
        self.done = 0

    def launch(self, work: Callable[[], None]) -> int:
        """Put work behind what is launched; its number."""
        self._waiting.append(work)
        self.launched += 1
        return self.launched

    def run_to(self, number: int) -> None:
        """Run everything up to this number. Main thread only."""
        while self.done < number:
            work = self._waiting.popleft()
            try:
                work()
            finally:
                with self._changed:
                    self.done += 1
                    self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Return when work up to this number has run. Raises TimeoutError rather than wait for ever."""
        if threading.get_ident() == self._main and not self._over:
            self.run_to(number)
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._over or self.done >= number, timeout=HOLD_TIMEOUT_S):
                raise TimeoutError(f"an event waited {HOLD_TIMEOUT_S:g} s for a forward that was never run")

    def shut(self) -> None:
        """The end of a run: nobody waits any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


_current: Stream | None = None


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """Inside the block, events are recorded on this stream."""
    global _current  # noqa: PLW0603 - the CUDA runtime has one current stream per thread, and so has this
    before, _current = _current, stream
    try:
        yield
    finally:
        _current = before


class Event:
    """Takes the place of `torch.cuda.Event`: done when what was launched before it was recorded has run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._stream: Stream | None = None
        self._mark = 0

    def record(self, *args: Any) -> None:
        """Behind everything launched so far."""
        del args
        self._stream = _current
        self._mark = _current.launched if _current is not None else 0

    def synchronize(self) -> None:
        """Wait for it."""
        if self._stream is not None:
            self._stream.wait(self._mark)

    def query(self) -> bool:
        """Whether it is done."""
        return self._stream is None or self._stream.done >= self._mark


def recorded() -> Event:
    """An event behind everything launched so far."""
    event = Event()
    event.record()
    return event
