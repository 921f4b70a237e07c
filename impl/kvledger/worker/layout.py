"""Address arithmetic: where the bytes of one logical block lie, for CPU and CUDA tensors alike.

A layer's KV cache is any strided tensor with a block dimension: blocks outermost or behind a K/V plane, padded,
several layers in one storage, kernel blocks smaller than the logical block. One logical block of one layer is a fixed
list of dense byte runs at a fixed distance from the block's start, so a block is `base + block_id * stride + offset`.

Object bytes = for each layer in order, its runs in ascending address order. Direct and staged transfers give the same
bytes.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvledger.errors import ConfigError

_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer: `base` is the address of block 0, `stride` the bytes between blocks, `offsets` where runs of `run`
    bytes begin."""

    name: str
    tensor: torch.Tensor
    num_blocks: int
    base: int
    stride: int
    offsets: tuple[int, ...]
    run: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one logical block of this layer, padding excluded."""
        return self.run * len(self.offsets)


@dataclass(frozen=True, slots=True)
class _Run:
    """Dense bytes of every block, as far as they lie side by side: of one layer, or of layers that are neighbours."""

    tensor: torch.Tensor
    base: int
    stride: int
    size: int

    def continues(self, before: "_Run") -> bool:
        """Whether these bytes follow at once upon the others', in the same memory and in each block."""
        same = self.tensor.untyped_storage().data_ptr() == before.tensor.untyped_storage().data_ptr()
        return same and self.stride == before.stride and self.base == before.base + before.size

    def view(self, num_blocks: int, word: torch.dtype) -> torch.Tensor:
        """`word` view of shape (num_blocks, size / item size) on the tensor's own storage."""
        storage = self.tensor.untyped_storage()
        n = word.itemsize
        first = (self.base - storage.data_ptr()) // n
        empty = torch.empty(0, dtype=word, device=self.tensor.device)
        return empty.set_(storage, first, (num_blocks, self.size // n), (self.stride // n, 1))


def _runs(layers: Sequence[LayerLayout]) -> list[_Run]:
    """The layers' runs in object order, neighbours joined."""
    joined: list[_Run] = []
    for layer in layers:
        for offset in layer.offsets:
            run = _Run(layer.tensor, layer.base + offset, layer.stride, layer.run)
            if joined and run.continues(joined[-1]):
                before = joined.pop()
                run = dataclasses.replace(before, size=before.size + run.size)
            joined.append(run)
    return joined


def _word(runs: Sequence[_Run]) -> torch.dtype:
    """The widest type in which all runs can be copied: a copy of words is ten times as fast as one of bytes."""
    places = [n for run in runs for n in (run.tensor.untyped_storage().data_ptr(), run.base, run.stride, run.size)]
    return next(w for w in _WORDS if all(n % w.itemsize == 0 for n in places))


def _block_dim(name: str, shape: tuple[int, ...], num_blocks: int) -> int:
    for dim in (0, 1):
        if dim < len(shape) and shape[dim] >= num_blocks and shape[dim] % num_blocks == 0:
            return dim
    raise ConfigError(
        field=f"kv_caches[{name!r}]",
        value=shape,
        remedy=f"expected {num_blocks} blocks (or a multiple) in dimension 0 or 1; this layout is not supported",
    )


def layer_layout(name: str, tensor: torch.Tensor, num_blocks: int) -> LayerLayout:
    """Work out a layer's layout from its strides.

    Args:
        name: layer name, for messages.
        tensor: KV cache of the layer, any dtype, any device.
        num_blocks: logical blocks of the pool.

    Raises:
        ConfigError: no dimension holds the blocks, or elements overlap.
    """
    dim = _block_dim(name, tuple(tensor.shape), num_blocks)
    item = tensor.element_size()
    kernel_blocks = tensor.shape[dim] // num_blocks
    stride = tensor.stride(dim) * item * kernel_blocks
    inner = [(n, s * item) for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if d != dim]
    inner.append((kernel_blocks, tensor.stride(dim) * item))
    run = item
    outer: list[tuple[int, int]] = []
    for size, step in sorted(((n, s) for n, s in inner if n > 1), key=lambda p: p[1]):
        if step < run:
            raise ConfigError(field=f"kv_caches[{name!r}]", value=tuple(tensor.stride()), remedy="elements overlap")
        if step == run and not outer:
            run *= size
        else:
            outer.append((size, step))
    steps = [range(0, size * step, step) for size, step in reversed(outer)]
    offsets = tuple(sorted(sum(c) for c in itertools.product(*steps)))
    return LayerLayout(name, tensor, num_blocks, tensor.data_ptr(), stride, offsets, run)


class CacheLayout:
    """All layers of one cache group on one rank."""

    def __init__(self, layers: Sequence[LayerLayout]) -> None:
        if not layers:
            raise ConfigError(field="kv_caches", value={}, remedy="a rank needs at least one layer")
        self.layers = tuple(layers)
        self.num_blocks = layers[0].num_blocks
        self.device = layers[0].tensor.device
        runs = _runs(layers)
        self.object_bytes = sum(run.size for run in runs)
        self.segments_per_object = len(runs)
        self._bases = np.array([run.base for run in runs], dtype=np.int64)
        self._strides = np.array([run.stride for run in runs], dtype=np.int64)
        self._sizes = [run.size for run in runs]
        self._word = _word(runs)
        self._views = [run.view(self.num_blocks, self._word) for run in runs]

    @classmethod
    def from_tensors(cls, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> "CacheLayout":
        """Lay out `kv_caches` (layer name → tensor) in the mapping's order; layers that share one cache count once.

        Raises:
            ConfigError: see `layer_layout`.
        """
        seen: dict[tuple[int, tuple[int, ...]], LayerLayout] = {}
        for name, tensor in kv_caches.items():
            place = (tensor.data_ptr(), tuple(tensor.stride()))
            if place not in seen:
                seen[place] = layer_layout(name, tensor, num_blocks)
        return cls(list(seen.values()))

    def describe(self) -> str:
        """The physical form of an object, for messages and tests: runs × bytes per layer, equal layers folded."""
        forms = [f"{len(layer.offsets)}x{layer.run}" for layer in self.layers]
        return ",".join(f"{len(list(g))}*{form}" for form, g in itertools.groupby(forms))

    def segments(self, block_ids: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes (bytes) of each block's runs, in object order (direct transfers).

        Raises:
            IndexError: no such block; an address outside the pool is never computed.
        """
        self._check(block_ids)
        ids = np.array(block_ids, dtype=np.int64)
        starts: list[list[int]] = (self._bases + ids[:, None] * self._strides).tolist()
        return starts, [self._sizes] * len(starts)

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of each storage behind the layers, once each (registration for direct transfers)."""
        storages = {s.data_ptr(): s.nbytes() for s in (layer.tensor.untyped_storage() for layer in self.layers)}
        return sorted(storages.items())

    def gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """Copy the blocks' object bytes into `out`, uint8 host tensor of shape (blocks, object_bytes); returns when
        done."""
        ids = self._ids(block_ids)
        columns = self._columns(out)
        if self.device.type == "cpu":
            for view, column in zip(self._views, columns, strict=True):
                torch.index_select(view, 0, ids, out=column)
            return
        rows = torch.cat([view.index_select(0, ids) for view in self._views], dim=1)
        out.copy_(rows.view(torch.uint8), non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()

    def scatter(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Copy object bytes, uint8 host tensor of shape (blocks, object_bytes), into the blocks; returns when done."""
        ids = self._ids(block_ids)
        for view, column in zip(self._views, self._columns(source.to(self.device, non_blocking=True)), strict=True):
            view.index_copy_(0, ids, column)
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def _columns(self, objects: torch.Tensor) -> Sequence[torch.Tensor]:
        """The part of each run in rows of object bytes, as words."""
        words = objects.view(self._word)
        columns: Sequence[torch.Tensor] = words.split([view.shape[1] for view in self._views], dim=1)
        return columns

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        self._check(block_ids)
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)

    def _check(self, block_ids: Sequence[int]) -> None:
        wrong = [b for b in block_ids if not 0 <= b < self.num_blocks]
        if wrong:
            raise IndexError(f"block ids {wrong[:8]} outside the pool of {self.num_blocks} blocks")
