"""One timed breaker, used for store pressure (scheduler side), a dead store (ranks) and lookups.

What may live here: the policy. No clock: `now` (seconds, monotonic) is an argument. Invariants: after `threshold`
failures in a row nothing is allowed for a delay that doubles up to `max_s`; then exactly one probe per delay is
allowed until something succeeds.
"""


class Breaker:
    """Closed while things work; open for a growing delay after failures; probes by itself."""

    def __init__(self, *, threshold: int, initial_s: float, max_s: float) -> None:
        self._threshold = threshold
        self._initial_s = initial_s
        self._max_s = max_s
        self._failures = 0
        self._delay_s = initial_s
        self._closed_at: float | None = None  # when the next probe is allowed; None while closed

    @property
    def is_open(self) -> bool:
        """Whether work is held back; what `allow` lets through meanwhile is a probe."""
        return self._closed_at is not None

    def allow(self, now: float) -> bool:
        """Whether work may start at `now`. While open, a True answer is the one probe of this delay."""
        if self._closed_at is None:
            return True
        if now < self._closed_at:
            return False
        self._closed_at = now + self._delay_s
        return True

    def success(self) -> bool:
        """Something worked: close. True if it was open."""
        was_open = self.is_open
        self._failures = 0
        self._delay_s = self._initial_s
        self._closed_at = None
        return was_open

    def failure(self, now: float) -> float:
        """Something failed: count, and open (longer than before when the probe failed). The delay (s); 0 if closed."""
        self._failures += 1
        if self._failures < self._threshold:
            return 0.0
        if self._closed_at is not None:
            self._delay_s = min(self._delay_s * 2, self._max_s)
        self._closed_at = now + self._delay_s
        return self._delay_s
