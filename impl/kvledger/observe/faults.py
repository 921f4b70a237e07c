"""What went wrong, counted by kind and told in rate-limited log lines: a failing store is neither silent nor loud.

One object per user of the store (a rank, the lookups). Every kind has a counter that is never reset; its first
occurrence is logged at once, then at most one line per `interval_s` says how many there were since the last line.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvledger.mooncake.codes import Code, describe
from kvledger.protocol import Breaker

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
ERROR_LENGTH = 300
"""Longest part of an exception's text in a line."""


class Faults:
    """Counters by kind and one rate-limited line each. `owner` begins each line. Thread-safe; nothing here raises."""

    def __init__(
        self, owner: str, *, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner = owner
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._faults: dict[str, int] = {}
        self._transitions: dict[str, int] = {}
        self._told: dict[str, tuple[float, int]] = {}  # kind -> when its last line came, and its count by then

    def counts(self) -> dict[str, int]:
        """How often each kind of fault has occurred; a copy."""
        with self._lock:
            return dict(self._faults)

    def transitions(self) -> dict[str, int]:
        """How often breakers have opened, probed and closed; a copy."""
        with self._lock:
            return dict(self._transitions)

    def record(
        self,
        kind: str,
        meaning: str,
        *,
        count: int = 1,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """Count `kind`, and say what it means unless it was said within the interval. `error` adds its traceback."""
        self._note(self._faults, kind, meaning, count=count, level=level, error=error)

    def answers(self, operation: str, answers: Iterable[int]) -> None:
        """Count answers of the store that are not what a call is for: codes, and numbers of bytes that are wrong."""
        for answer, count in Counter(answers).items():
            level = (
                logging.INFO if answer == Code.OBJECT_NOT_FOUND else logging.WARNING
            )  # evicted: a cache's daily life
            self.record(f"{operation} {_name(answer)}", describe(answer), count=count, level=level)

    def raised(self, operation: str, error: BaseException) -> None:
        """Count a call that raised."""
        name = type(error).__name__
        self.record(f"{operation} {name}", f"the call raised {name}: {str(error)[:ERROR_LENGTH]}")

    # -- what a breaker does, as the adapters use it ---------------------------

    def allowed(self, name: str, breaker: Breaker, now: float) -> bool:
        """`breaker.allow`, and a line if that is a probe."""
        was_open = breaker.is_open
        allowed = breaker.allow(now)
        if allowed and was_open:
            self._transition(f"{name} breaker probes", "one call is let through, to see whether the store works again")
        return allowed

    def failed(self, name: str, breaker: Breaker, now: float) -> None:
        """`breaker.failure`, and a line if it is open now."""
        delay_s = breaker.failure(now)
        if delay_s:
            meaning = f"the store keeps failing and is left alone for {delay_s:g} s"
            self._transition(f"{name} breaker opened", meaning, logging.WARNING)

    def worked(self, name: str, breaker: Breaker) -> None:
        """`breaker.success`, and a line if it was open."""
        if breaker.success():
            self._transition(f"{name} breaker closed", "the store works again")

    def _transition(self, kind: str, meaning: str, level: int = logging.INFO) -> None:
        self._note(self._transitions, kind, meaning, count=1, level=level, error=None)

    # -- lines -----------------------------------------------------------------

    def _note(
        self, table: dict[str, int], kind: str, meaning: str, *, count: int, level: int, error: BaseException | None
    ) -> None:
        with self._lock:
            total = table[kind] = table.get(kind, 0) + count
            now = self._clock()
            when, before = self._told.get(kind, (-math.inf, 0))
            if now - when < self._interval_s:
                return
            self._told[kind] = (now, total)
        more = "" if total - before == 1 else f", {total - before} times since the last line"
        logger.log(level, "kvledger %s: %s%s: %s", self._owner, kind, more, meaning, exc_info=error)

    def flush(self) -> None:
        """Say what was counted and not told, before the end."""
        with self._lock:
            counts = {**self._faults, **self._transitions}
            left = {kind: count - self._told[kind][1] for kind, count in counts.items()}
            self._told.update((kind, (self._clock(), count)) for kind, count in counts.items())
        for kind, more in left.items():
            if more:
                logger.info("kvledger %s: %s, %d more since the last line", self._owner, kind, more)


def _name(answer: int) -> str:
    if answer > 0:
        return "wrong size"
    try:
        return Code(answer).name
    except ValueError:
        return f"code {answer}"
