"""Lookups beyond the local hit: how many leading blocks the store holds, for every rank.

Own thread and own store client (no memory contributed, no socket to rank 0). The scheduler thread waits at most its
step's allowance, then answers None; a lookup that misses its deadline, fails, or finds the breaker open is a miss. So
is every lookup once the thread has died too often in a row.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvledger.keys import KeySpace
from kvledger.mooncake.client import StoreClient
from kvledger.mooncake.codes import Code
from kvledger.observe.faults import Faults
from kvledger.protocol import Breaker
from kvledger.shutdown import shutdown_budget_s

RESTARTS = 3
"""Most restarts of the thread in a row; a lookup that was answered begins a new row."""


@dataclass(slots=True)
class Lookup:
    """One question: the longest run of `hashes`, from the first on, that the store holds for every rank."""

    hashes: Sequence[bytes]
    epoch: str
    deadline: float
    found: int | None = None
    missed: bytes | None = None
    """The first hash that was not there, if the store said so (not after a failure)."""
    failed: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class LookupCounters:
    """How lookups ended. `keys` counts keys probed."""

    asked: int = 0
    answered: int = 0
    timed_out: int = 0
    failed: int = 0
    refused: int = 0
    keys: int = 0
    dead: int = 0
    """Misses because the thread had died."""
    faults: dict[str, int] = field(default_factory=dict)
    """Occurrences by kind, codes by key; replaced as a whole, so that readers need no lock."""
    breakers: dict[str, int] = field(default_factory=dict)
    """How often the breaker opened, probed and closed; replaced likewise."""


class LookupService:
    """Asks the store which blocks it holds, on its own thread."""

    def __init__(
        self,
        *,
        client: StoreClient,
        keys: KeySpace,
        shards: int,
        chunk_blocks: int,
        timeout_s: float,
        breaker: Breaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._shards = shards
        self._chunk_blocks = chunk_blocks
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self.counters = LookupCounters()
        self._faults = Faults("lookups")
        self._dead = False
        self._thread = threading.Thread(target=self._loop, name="kvledger-lookup", daemon=True)
        self._thread.start()

    def ask(self, hashes: Sequence[bytes], epoch: str) -> Lookup:
        """Start a lookup. While the breaker is open it is a miss at once. Never blocks."""
        now = self._clock()
        lookup = Lookup(hashes, epoch, now + self._timeout_s)
        self.counters.asked += 1
        if not self.alive():
            self._miss_of_the_dead(lookup)
            return lookup
        with self._lock:
            allowed = self._faults.allowed("lookup", self._breaker, now)
        if not allowed:
            self.counters.refused += 1
            self._answer(lookup, 0)
            return lookup
        self._queue.put(lookup)
        if not self.alive():  # it died meanwhile, perhaps after it had answered all that was queued
            self._miss_of_the_dead(lookup)
        return lookup

    def alive(self) -> bool:
        """Whether the thread answers lookups."""
        return not self._dead and self._thread.is_alive()

    def _miss_of_the_dead(self, lookup: Lookup) -> None:
        self.counters.dead += 1
        self._answer(lookup, 0)

    def result(self, lookup: Lookup, wait_s: float) -> int | None:
        """Blocks found, or None while unknown. Waits at most `wait_s`; past the deadline the answer is 0 for good."""
        if wait_s > 0:
            lookup.done.wait(wait_s)
        if not lookup.done.is_set() and self._clock() >= lookup.deadline:
            self.counters.timed_out += 1
            self._faults.record(
                "lookup timed out", f"no answer within {self._timeout_s:g} s (lookup_timeout_s): a miss"
            )
            self._failure()
            self._answer(lookup, 0)
        return lookup.found if lookup.done.is_set() else None

    def close(self, timeout_s: float) -> None:
        """End the thread, then the client; bounded by `timeout_s` and by what vLLM grants (`shutdown_budget_s`)."""
        deadline = time.monotonic() + shutdown_budget_s(timeout_s)
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._faults.record("still asking", "the lookup thread is inside a store call at shutdown")
        self._client.close(max(0.1, deadline - time.monotonic()))
        self._faults.flush()

    def _loop(self) -> None:
        deaths = 0
        while deaths <= RESTARTS:
            lookup: Lookup | None = None
            try:
                while (lookup := self._queue.get()) is not None:
                    if lookup.done.is_set() or self._clock() >= lookup.deadline:
                        continue  # nobody waits any more; the asker counts it
                    self._serve(lookup)
                    deaths = 0
            except BaseException as error:  # noqa: BLE001 - whatever ends the thread, nobody may wait for it
                deaths += 1
                self._die(error, lookup, over=deaths > RESTARTS)
            else:
                return

    def _serve(self, lookup: Lookup) -> None:
        try:
            self._run(lookup)
        except Exception as e:  # noqa: BLE001 - a lookup must never end the thread: it is a miss
            self._faults.raised("exists", e)
            self.counters.failed += 1
            self._failure()
            self._answer(lookup, 0)

    def _die(self, error: BaseException, lookup: Lookup | None, *, over: bool) -> None:
        """The thread starts again, or is dead from now on: then those that wait are answered, after it is marked so."""
        self._dead = over
        ends, then = "died", "it goes on; if this comes again, report it"
        if over:
            ends, then = (
                "ended",
                "it died too often: from now on every lookup is a miss, nothing is loaded; restart vLLM",
            )
        cause = f"{type(error).__name__}: {error!s:.300}"
        self._faults.record(f"lookup thread {ends}", f"{cause}; {then}", level=logging.ERROR, error=error)
        self._publish()
        if lookup is not None:
            self._answer(lookup, 0)
        while over and not self._queue.empty():
            left = self._queue.get()
            if left is not None:
                self._miss_of_the_dead(left)

    def _run(self, lookup: Lookup) -> None:
        found = 0
        for start in range(0, len(lookup.hashes), self._chunk_blocks):
            chunk = lookup.hashes[start : start + self._chunk_blocks]
            good, failed = self._probe(chunk, lookup.epoch)
            found += good
            if failed:
                lookup.failed = True
                break
            if good < len(chunk):
                lookup.missed = chunk[good]
                break
        if lookup.done.is_set():
            return  # past its deadline, a failure already: a store that always answers late must not close the breaker
        if lookup.failed:
            self.counters.failed += 1
            self._failure()
        else:
            self.counters.answered += 1
            with self._lock:
                self._faults.worked("lookup", self._breaker)
            self._publish()
        self._answer(lookup, found)

    def _probe(self, chunk: Sequence[bytes], epoch: str) -> tuple[int, bool]:
        """Leading blocks of the chunk that every shard has, and whether the store failed to answer."""
        names = [
            self._keys.object_key(shard=s, group=0, block_hash=h, epoch=epoch)
            for h in chunk
            for s in range(self._shards)
        ]
        self.counters.keys += len(names)
        answers = self._client.exists(names)
        if not isinstance(answers, list) or len(answers) != len(names):
            self._faults.record(
                "exists wrong length", f"not one answer for each of {len(names)} keys: {answers!r:.200}"
            )
            answers = [int(Code.TRANSFER_FAIL)] * len(names)
        else:
            self._faults.answers("exists", [a for a in answers if a not in (0, 1)])
        for i in range(len(chunk)):
            shard_answers = answers[i * self._shards : (i + 1) * self._shards]
            if any(a < 0 for a in shard_answers):
                return i, True
            if any(a != 1 for a in shard_answers):
                return i, False
        return len(chunk), False

    def _failure(self) -> None:
        with self._lock:
            self._faults.failed("lookup", self._breaker, self._clock())
        self._publish()

    def _publish(self) -> None:
        self.counters.faults, self.counters.breakers = self._faults.counts(), self._faults.transitions()

    def _answer(self, lookup: Lookup, found: int) -> None:
        """The first answer stands."""
        with self._lock:
            if not lookup.done.is_set():
                lookup.found = found
                lookup.done.set()
