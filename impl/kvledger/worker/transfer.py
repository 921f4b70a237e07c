"""One job, from first probe to its result, on one rank. No thread here: a lane calls `run`.

Per block only what provably arrived counts: result list of the right length (the client sees to it), code, byte
count. Batches bound the bytes and segments in flight. After each wait the job asks the desk whether it may go on: one
that was given up touches nothing more, because its blocks may belong to someone else by then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvledger.keys import KeySpace
from kvledger.mooncake.client import StoreClient
from kvledger.mooncake.codes import Code, is_indeterminate, is_no_space, is_store_down
from kvledger.observe.faults import Faults
from kvledger.protocol import Breaker, Job, Kind, Result
from kvledger.worker.desk import Desk
from kvledger.worker.fence import Fence, FenceTimeoutError
from kvledger.worker.layout import CacheLayout
from kvledger.worker.staging import Slot, StagingArea


class GivenUpError(Exception):
    """The job was given up while it ran: it is already reported, and its blocks are no longer ours to touch."""


class NoSlotError(RuntimeError):
    """No staging memory is free; the job fails and is retried later."""


class StoreCallError(RuntimeError):
    """A call of the store's client raised. It is counted already."""


@dataclass(slots=True)
class Outcome:
    """Running result of a job."""

    unproven: set[int]
    """Positions not yet proven stored or loaded."""
    fence: Fence
    """Passed before blocks are read or written."""
    result: Result = Result.DONE
    moving: bool = False
    """A transfer call is out, or ended without saying that its bytes have stopped moving."""
    store_down: bool = False

    def note(self, position: int, result: Result, code: int) -> None:
        """Keep one object's result; the job's is the worst."""
        if result is Result.DONE:
            self.unproven.discard(position)
        self.result = max(self.result, result)
        self.store_down = self.store_down or (code < 0 and (is_store_down(code) or is_indeterminate(code)))

    def close(self) -> tuple[Result, tuple[int, ...]]:
        """Result and bad positions; unproven positions make it at least FAILED."""
        if not self.unproven:
            return Result.DONE, ()
        worst = Result.FAILED if self.result is Result.DONE else self.result
        return worst, tuple(sorted(self.unproven))


def classify_put(code: int) -> Result:
    """Result of one object's put code (0 is stored)."""
    if code == 0:
        return Result.DONE
    if is_no_space(code):
        return Result.REFUSED
    return Result.INDETERMINATE if is_indeterminate(code) else Result.FAILED


def classify_get(code: int, expected_bytes: int) -> Result:
    """Result of one object's get code (bytes read, or negative)."""
    if code == expected_bytes:
        return Result.DONE
    return Result.INDETERMINATE if code < 0 and is_indeterminate(code) else Result.FAILED


class Transfer:
    """Runs jobs of one lane against the store. `staging` None means direct mode: the store moves KV blocks itself."""

    def __init__(
        self,
        *,
        desk: Desk,
        client: StoreClient,
        layout: CacheLayout,
        keys: KeySpace,
        shard: int,
        staging: StagingArea | None,
        batch_objects: int,
        breaker: Breaker,
        faults: Faults,
        fence_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._desk = desk
        self._client = client
        self._layout = layout
        self._keys = keys
        self._shard = shard
        self._staging = staging
        self._batch_objects = batch_objects
        self._breaker = breaker
        self._faults = faults
        self._fence_timeout_s = fence_timeout_s
        self._clock = clock

    def run(self, job: Job, fence: Fence) -> None:
        """From `RankStart` to `RankFinish` or `RankQuarantine`: run the job to its one exit.

        The fence comes first: a store that reads before the forward has run publishes the block's former bytes.
        """
        outcome = Outcome(set(range(len(job.block_ids))), fence)
        try:
            if job.kind is Kind.STORE or self._staging is None:
                fence.wait(self._fence_timeout_s)
            self._go_on(job)
            if self._faults.allowed(job.kind.value, self._breaker, self._clock()):
                self._store(job, outcome) if job.kind is Kind.STORE else self._load(job, outcome)
            else:
                self._faults.record(f"{job.kind.value} not tried", "the store is left alone for a while (breaker)")
        except GivenUpError:  # counted where it was given up
            return
        except StoreCallError:
            outcome.result = Result.INDETERMINATE if outcome.moving else max(outcome.result, Result.FAILED)
            outcome.store_down = True
        except (NoSlotError, FenceTimeoutError) as e:
            self._faults.raised(job.kind.value, e)
        except Exception as e:  # noqa: BLE001 - not the store's fault (a local copy, out of memory): says nothing about it
            self._faults.raised(f"{job.kind.value} in this process", e)
            outcome.result = Result.INDETERMINATE if outcome.moving else max(outcome.result, Result.FAILED)
        self._exit(job, outcome)

    def _exit(self, job: Job, outcome: Outcome) -> None:
        """`RankFinish`; or `RankQuarantine` if bytes of KV blocks may still move.

        A call that gave up is not a transfer that is over: reported now, the block would be given away under it. In
        staged mode what may move is a slot, which is quarantined instead (`_place`), and the blocks are free.
        """
        result, bad = outcome.close()
        if outcome.store_down:
            self._faults.failed(job.kind.value, self._breaker, self._clock())
        elif result in (Result.DONE, Result.REFUSED):
            self._faults.worked(job.kind.value, self._breaker)
        if outcome.moving and self._staging is None:
            self._desk.quarantine(job.job_id, bad)
        else:
            self._desk.finish(job.job_id, result, bad)

    def _go_on(self, job: Job, *, guarded: bool = False) -> None:
        if not self._desk.proceed(job.job_id, guarded=guarded):
            raise GivenUpError

    def _call(self, operation: str, keys: int, good: tuple[int, ...], call: Callable[[], list[int]]) -> list[int]:
        """The store's answer, one entry per key; indeterminate ones if there are not exactly as many. Counts what is bad.

        Raises:
            StoreCallError: the client raised.
        """
        try:
            answers = call()
        except Exception as e:
            self._faults.raised(operation, e)
            raise StoreCallError from e
        if not isinstance(answers, list) or len(answers) != keys:
            self._faults.record(
                f"{operation} wrong length", f"not one answer for each of {keys} keys: {answers!r:.200}"
            )
            return [int(Code.TRANSFER_FAIL)] * keys
        self._faults.answers(operation, [a for a in answers if a not in good])
        return answers

    def _batches(self, job: Job, positions: Sequence[int], outcome: Outcome) -> Iterator[Sequence[int]]:
        """Batches of positions, as long as everything goes well and the job is still ours."""
        start = 0
        while start < len(positions) and outcome.result is Result.DONE:
            self._go_on(job)
            batch = positions[start : start + self._batch_size()]
            start += len(batch)
            yield batch

    def _batch_size(self) -> int:
        """Objects of the next batch: fewer than usual while much of the staging memory is in quarantine."""
        if self._staging is None:
            return self._batch_objects
        return max(1, min(self._batch_objects, self._staging.room(self._clock())))

    def _names(self, job: Job, positions: Sequence[int]) -> list[str]:
        return [
            self._keys.object_key(shard=self._shard, group=job.group, block_hash=job.hashes[p], epoch=job.epoch)
            for p in positions
        ]

    # A failed batch ends a store (what is left is retried as a new job) and a load (vLLM recomputes from the first bad
    # block on).

    def _store(self, job: Job, outcome: Outcome) -> None:
        for batch in self._batches(job, self._absent(job, outcome), outcome):
            for position, code in zip(batch, self._put(job, batch, outcome), strict=True):
                outcome.note(position, classify_put(code), code)

    def _load(self, job: Job, outcome: Outcome) -> None:
        for batch in self._batches(job, range(len(job.block_ids)), outcome):
            for position, code in zip(batch, self._get(job, batch, outcome), strict=True):
                outcome.note(position, classify_get(code, self._layout.object_bytes), code)

    def _absent(self, job: Job, outcome: Outcome) -> list[int]:
        """Positions whose object the store does not hold; marks the others stored. A probe moves no bytes."""
        positions = range(len(job.block_ids))
        names = self._names(job, positions)
        answers = self._call("exists", len(names), (0, 1), lambda: self._client.exists(names))
        for position, answer in zip(positions, answers, strict=True):
            if answer != 0:
                outcome.note(position, Result.DONE if answer == 1 else Result.FAILED, answer)
        return [p for p, answer in zip(positions, answers, strict=True) if answer == 0]

    def _put(self, job: Job, batch: Sequence[int], outcome: Outcome) -> list[int]:
        blocks = [job.block_ids[p] for p in batch]
        names = self._names(job, batch)
        with self._place(blocks, outcome) as (slot, pointers, sizes):
            if slot is not None:
                self._layout.gather(blocks, slot.rows)
                self._go_on(job)  # given up meanwhile: the gathered bytes may be another request's
            outcome.moving = True
            codes = self._call("put", len(batch), (0,), lambda: self._client.put(names, pointers, sizes))
            outcome.moving = any(is_indeterminate(c) for c in codes)
        return codes

    def _get(self, job: Job, batch: Sequence[int], outcome: Outcome) -> list[int]:
        blocks = [job.block_ids[p] for p in batch]
        names = self._names(job, batch)
        with self._place(blocks, outcome) as (slot, pointers, sizes):
            outcome.moving = True
            whole = (self._layout.object_bytes,)
            codes = self._call("get", len(batch), whole, lambda: self._client.get(names, pointers, sizes))
            outcome.moving = any(c < 0 and is_indeterminate(c) for c in codes)
            if slot is not None:
                outcome.fence.wait(self._fence_timeout_s)  # an earlier step may still write the target blocks
                self._fill(job, blocks, codes, slot)
        return codes

    def _fill(self, job: Job, blocks: Sequence[int], codes: Sequence[int], slot: Slot) -> None:
        """Copy what arrived from the slot into the blocks, in a stage that is not given up halfway."""
        good = [i for i, c in enumerate(codes) if c == self._layout.object_bytes]
        if not good:
            return
        rows = slot.rows if len(good) == len(blocks) else slot.rows[torch.tensor(good)]
        self._go_on(job, guarded=True)
        self._layout.scatter([blocks[i] for i in good], rows)
        self._go_on(job)

    @contextmanager
    def _place(
        self, blocks: Sequence[int], outcome: Outcome
    ) -> Iterator[tuple[Slot | None, list[list[int]], list[list[int]]]]:
        """Where the store reads or writes: a staging slot, or the blocks' own runs (direct mode).

        A slot whose bytes may still move goes to quarantine instead of back.
        """
        if self._staging is None:
            yield None, *self._layout.segments(blocks)
            return
        slot = self._staging.take(len(blocks), self._clock())
        if slot is None:
            raise NoSlotError("all staging memory is in quarantine after transfers that never ended")
        try:
            yield slot, [[slot.pointer(i)] for i in range(len(blocks))], [[self._layout.object_bytes]] * len(blocks)
        finally:
            if outcome.moving:
                self._staging.quarantine(slot, self._clock())
            else:
                self._staging.give_back(slot)
