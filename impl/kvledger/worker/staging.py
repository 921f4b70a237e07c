"""Registered staging slots: transfers touch a slot, never a KV block.

A slot whose transfer ended indeterminate stays out of use until the quarantine bound has passed: a late put may still
read it, a late get may still write it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvledger.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """`capacity` objects of `object_bytes` each, `pitch` bytes apart, at `address`."""

    index: int
    address: int
    rows: torch.Tensor
    capacity: int
    pitch: int

    def pointer(self, row: int) -> int:
        """Address of one object."""
        return self.address + row * self.pitch


class StagingArea:
    """A fixed set of slots in one host buffer (page-locked beside CUDA)."""

    def __init__(
        self, *, total_bytes: int, slot_bytes: int, object_bytes: int, pin_memory: bool, quarantine_s: float
    ) -> None:
        pitch = object_bytes
        per_slot = slot_bytes // pitch
        count = total_bytes // slot_bytes
        if per_slot < 1 or count < 1:
            raise ConfigError(
                field="max_batch_bytes",
                value=slot_bytes,
                remedy=f"one KV block of this rank takes {object_bytes} bytes; raise max_batch_bytes "
                f"(and staging_bytes, now {total_bytes}) so that at least one fits",
            )
        self.buffer = torch.empty(count * per_slot * pitch, dtype=torch.uint8, pin_memory=pin_memory)
        rows = self.buffer.view(count, per_slot, pitch)
        base = self.buffer.data_ptr()
        self._slots = [Slot(i, base + i * per_slot * pitch, rows[i], per_slot, pitch) for i in range(count)]
        self._free = list(range(count))
        self._held: dict[int, float] = {}
        self._quarantine_s = quarantine_s

    @property
    def slot_capacity(self) -> int:
        """Objects per slot."""
        return self._slots[0].capacity

    def take(self, now: float) -> Slot | None:
        """A free slot, or None while all are in use or quarantined."""
        for index in [i for i, until in self._held.items() if until <= now]:
            del self._held[index]
            self._free.append(index)
        return self._slots[self._free.pop()] if self._free else None

    def give_back(self, slot: Slot) -> None:
        """The slot's transfer is over."""
        self._free.append(slot.index)

    def quarantine(self, slot: Slot, now: float) -> None:
        """The slot's transfer may still move bytes."""
        self._held[slot.index] = now + self._quarantine_s

    @property
    def quarantined(self) -> int:
        """Slots held back."""
        return len(self._held)

    def register(self, register: Callable[[int, int], None]) -> None:
        """Register the whole buffer with the store client, once."""
        register(self.buffer.data_ptr(), self.buffer.nbytes)
