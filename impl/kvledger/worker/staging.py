"""Registered staging memory of a lane: transfers touch it, never a KV block.

Rows whose transfer ended indeterminate stay out of use until the quarantine bound has passed: a late put may still read
them, a late get may still write them. A transfer may take half of the longest free stretch at most, so that a store that
keeps failing leaves ever smaller batches instead of none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvledger.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows of one transfer, from row `first` on: one object each, `pitch` bytes apart, at `address`."""

    first: int
    address: int
    rows: torch.Tensor
    pitch: int

    def pointer(self, row: int) -> int:
        """Address of one object."""
        return self.address + row * self.pitch


class StagingArea:
    """One host buffer (page-locked beside CUDA), a row per object."""

    def __init__(
        self, *, total_bytes: int, batch_bytes: int, object_bytes: int, pin_memory: bool, quarantine_s: float
    ) -> None:
        self.batch_objects = batch_bytes // object_bytes
        self._count = total_bytes // object_bytes
        if min(self.batch_objects, self._count) < 1:
            raise ConfigError(
                field="max_batch_bytes",
                value=batch_bytes,
                remedy=f"one KV block of this rank takes {object_bytes} bytes; raise max_batch_bytes "
                f"(and staging_bytes, of which a lane has {total_bytes}) so that at least one fits",
            )
        self.buffer = torch.empty(self._count * object_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._rows = self.buffer.view(self._count, object_bytes)
        self._held: dict[int, tuple[int, float]] = {}  # first row -> row after the last, and when they are free again
        self._quarantine_s = quarantine_s

    def _longest_free(self, now: float) -> range:
        self._held = {first: held for first, held in self._held.items() if held[1] > now}
        longest, start = range(0), 0
        for first, (end, _) in [*sorted(self._held.items()), (self._count, (self._count, now))]:
            longest = max(longest, range(start, first), key=len)
            start = end
        return longest

    def room(self, now: float) -> int:
        """Most objects that the next transfer may take; 0 while all rows are in use or quarantined."""
        return -(-len(self._longest_free(now)) // 2)

    def take(self, count: int, now: float) -> Slot | None:
        """Rows for one transfer, or None if there is no room for that many."""
        if count > self.room(now):
            return None
        first = self._longest_free(now).start
        self._held[first] = (first + count, math.inf)
        rows = self._rows[first : first + count]
        return Slot(first, rows.data_ptr(), rows, self._rows.shape[1])

    def give_back(self, slot: Slot) -> None:
        """The slot's transfer is over."""
        del self._held[slot.first]

    def quarantine(self, slot: Slot, now: float) -> None:
        """The slot's transfer may still move bytes."""
        self._held[slot.first] = (slot.first + len(slot.rows), now + self._quarantine_s)

    def register(self, register: Callable[[int, int], None]) -> None:
        """Register the whole buffer with the store client, once."""
        register(self.buffer.data_ptr(), self.buffer.nbytes)
