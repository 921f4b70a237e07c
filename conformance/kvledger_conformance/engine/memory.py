"""KV memory of the ranks, and which block an address belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvledger_conformance.engine.oracle import LAYERS
from kvledger_conformance.engine.stream import Stream

GARBAGE = -7


@dataclass
class Rank:
    """One rank: its connector and its KV cache, (blocks, tokens per block) of 8-byte cells per layer."""

    index: int
    connector: Any
    tensors: dict[str, torch.Tensor]
    cells: list[Any] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)

    @classmethod
    def build(cls, index: int, connector: Any, num_blocks: int, block_size: int) -> "Rank":
        """Allocate and hand the caches to the connector."""
        tensors = {n: torch.full((num_blocks, block_size), GARBAGE, dtype=torch.int64) for n in LAYERS}
        connector.register_kv_caches(tensors)
        return cls(index, connector, tensors, [t.numpy() for t in tensors.values()])

    def blocks_at(self, segments: Sequence[Sequence[tuple[int, int]]]) -> set[int]:
        """Blocks whose cells these (address, size) pairs touch; empty for staging memory."""
        found: set[int] = set()
        for tensor in self.tensors.values():
            base, size = tensor.data_ptr(), tensor.nbytes
            step = size // tensor.shape[0]
            for address, length in (pair for one in segments for pair in one):
                if base <= address < base + size:
                    found.update(range((address - base) // step, (address - base + length - 1) // step + 1))
        return found

    def spoil(self, blocks: Sequence[int]) -> None:
        """Other traffic writes these blocks."""
        for layer in self.cells:
            layer[list(blocks)] = GARBAGE
