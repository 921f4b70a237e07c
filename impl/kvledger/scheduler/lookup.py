"""Lookups beyond the local hit: how many leading blocks the store holds, for every rank.

Own thread and own store client (no memory contributed, no socket to rank 0). The scheduler thread waits at most its
step's allowance, then answers None; a lookup that misses its deadline, fails, or finds the breaker open is a miss.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvledger.keys import KeySpace
from kvledger.mooncake.client import StoreClient
from kvledger.protocol import Breaker

logger = logging.getLogger(__name__)


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
        self._thread = threading.Thread(target=self._loop, name="kvledger-lookup", daemon=True)
        self._thread.start()

    def ask(self, hashes: Sequence[bytes], epoch: str) -> Lookup:
        """Start a lookup. While the breaker is open it is a miss at once. Never blocks."""
        now = self._clock()
        lookup = Lookup(hashes, epoch, now + self._timeout_s)
        self.counters.asked += 1
        with self._lock:
            allowed = self._breaker.allow(now)
        if allowed:
            self._queue.put(lookup)
        else:
            self.counters.refused += 1
            self._answer(lookup, 0)
        return lookup

    def result(self, lookup: Lookup, wait_s: float) -> int | None:
        """Blocks found, or None while unknown. Waits at most `wait_s`; past the deadline the answer is 0 for good."""
        if wait_s > 0:
            lookup.done.wait(wait_s)
        if not lookup.done.is_set() and self._clock() >= lookup.deadline:
            self.counters.timed_out += 1
            self._failure()
            self._answer(lookup, 0)
        return lookup.found if lookup.done.is_set() else None

    def close(self, timeout_s: float) -> None:
        """End the thread (bounded), then the client."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._client.close(timeout_s)

    def _loop(self) -> None:
        while (lookup := self._queue.get()) is not None:
            if lookup.done.is_set() or self._clock() >= lookup.deadline:
                continue  # nobody waits any more; the asker counts it
            try:
                self._run(lookup)
            except Exception as e:  # noqa: BLE001 - a lookup must never end the thread: it is a miss
                logger.warning("lookup failed, counted as a miss: %s: %.300s", type(e).__name__, e)
                self.counters.failed += 1
                self._failure()
                self._answer(lookup, 0)

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
        if lookup.failed:
            self.counters.failed += 1
            self._failure()
        else:
            self.counters.answered += 1
            with self._lock:
                self._breaker.success()
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
        for i in range(len(chunk)):
            shard_answers = answers[i * self._shards : (i + 1) * self._shards]
            if any(a < 0 for a in shard_answers):
                return i, True
            if any(a != 1 for a in shard_answers):
                return i, False
        return len(chunk), False

    def _failure(self) -> None:
        with self._lock:
            self._breaker.failure(self._clock())

    def _answer(self, lookup: Lookup, found: int) -> None:
        """The first answer stands."""
        with self._lock:
            if not lookup.done.is_set():
                lookup.found = found
                lookup.done.set()
