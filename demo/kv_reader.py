"""What the reference engine's ranks can do besides serving: write KV blocks as the store should hold them."""

from pathlib import Path
from typing import Any


class KVReader:
    """Mixed into every rank's worker class (``worker_extension_cls``). An object is, for each layer in order, the
    block's bytes of that layer's KV tensor."""

    model_runner: Any
    rank: int

    def dump_blocks(self, block_ids: list[int], folder: str) -> int:
        """Writes ``kv_rank<r>.bin``, one record per block; returns the record's size in bytes."""
        import torch

        size = 0
        with open(Path(folder) / f"kv_rank{self.rank}.bin", "wb") as file:
            for block_id in block_ids:
                layers = [cache[block_id].contiguous().view(torch.uint8) for cache in self.model_runner.kv_caches]
                record = b"".join(layer.numpy().tobytes() for layer in layers)
                size = len(record)
                file.write(record)
        return size
