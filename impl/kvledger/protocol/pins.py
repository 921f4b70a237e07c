"""Pins: which job holds a block-pool reference on which blocks.

What may live here: the table and its counts. Model: `held` of an entry of `led`, the operator `Pins`; `EmitStore` pins,
the `ApplyReport` that settles a job unpins, `WithinBudget` is `fits`. Invariants: a job pins once and unpins once;
`blocks()` counts for each block the open jobs that pinned it; no more than `max_blocks` distinct blocks are pinned.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvledger.errors import ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSnapshot:
    """Distinct blocks pinned now, the most ever pinned at once, the budget, and jobs that hold pins."""

    blocks: int
    blocks_max: int
    max_blocks: int
    jobs: int


class PinTable:
    """References that store jobs hold on their source blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_job: dict[int, tuple[int, ...]] = {}
        self._count: dict[int, int] = {}
        self._peak = 0

    def fits(self, chosen: int, block_id: int) -> bool:
        """`WithinBudget`: whether `block_id` may be pinned on top of `chosen` blocks that are about to be pinned."""
        return block_id in self._count or len(self._count) + chosen < self._max_blocks

    @property
    def is_full(self) -> bool:
        """Whether no block may be pinned that is not pinned already."""
        return len(self._count) >= self._max_blocks

    def pin(self, job_id: int, block_ids: tuple[int, ...]) -> None:
        """`Pins` of a store job: note one reference per block.

        Raises:
            ProtocolError: the job already holds pins, names a block twice, or would exceed the budget.
        """
        if job_id in self._by_job:
            raise ProtocolError("job pins twice", job_id=job_id, action="EmitStore")
        if len(set(block_ids)) != len(block_ids):
            raise ProtocolError("job pins one block twice", job_id=job_id, action="EmitStore")
        new = sum(b not in self._count for b in block_ids)
        if len(self._count) + new > self._max_blocks:
            raise ProtocolError(
                f"{new} more pinned blocks exceed the budget: {len(self._count)} of {self._max_blocks} in use",
                job_id=job_id,
                action="EmitStore",
            )
        self._by_job[job_id] = block_ids
        for b in block_ids:
            self._count[b] = self._count.get(b, 0) + 1
        self._peak = max(self._peak, len(self._count))

    def unpin(self, job_id: int) -> tuple[int, ...]:
        """`Pins`, given back: forget the job's pins and return its blocks tail first, the order in which vLLM frees a request.

        Raises:
            ProtocolError: the job holds no pins.
        """
        if job_id not in self._by_job:
            raise ProtocolError("job holds no pins", job_id=job_id, action="ApplyReport")
        blocks = self._by_job.pop(job_id)
        for b in blocks:
            left = self._count[b] - 1
            if left:
                self._count[b] = left
            else:
                del self._count[b]
        return blocks[::-1]

    def held(self, job_id: int) -> tuple[int, ...]:
        """Blocks that the job pins; none if it holds no pins."""
        return self._by_job.get(job_id, ())

    def blocks(self) -> Iterable[tuple[int, int]]:
        """(block id, our references) for every pinned block."""
        return self._count.items()

    def snapshot(self) -> PinSnapshot:
        """Figures for gauges and tests."""
        return PinSnapshot(
            blocks=len(self._count), blocks_max=self._peak, max_blocks=self._max_blocks, jobs=len(self._by_job)
        )
