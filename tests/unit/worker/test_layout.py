"""Address arithmetic over every form of KV cache that vLLM hands out, bytes compared with a slow, obvious reader."""

import ctypes

import pytest
import torch

from kvledger.errors import ConfigError
from kvledger.worker.layout import CacheLayout

BLOCKS = 6


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def filled(shape: tuple[int, ...], device: str) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int64) * 2654435761 % 251).to(torch.uint8).view(shape).to(device)


def blocks_outermost(device):
    return {f"l{i}": filled((BLOCKS, 2, 4, 8), device) + i for i in range(3)}


def planes_outermost(device):
    return {f"l{i}": filled((2, BLOCKS, 4, 8), device) + i for i in range(2)}


def heads_before_blocks(device):
    return {"l0": filled((3, BLOCKS, 4, 8), device).permute(1, 0, 2, 3)}


def interleaved_layers(device):
    whole = filled((BLOCKS, 3, 2, 4, 8), device)
    return {f"l{i}": whole[:, i] for i in range(3)}


def padded_blocks(device):
    storage = filled((BLOCKS * 80 + 7,), device)
    return {"l0": torch.as_strided(storage, (BLOCKS, 2, 32), (80, 32, 1), 7)}


def kernel_blocks(device):
    return {"l0": filled((BLOCKS * 2, 4, 8), device)}


def two_layers_in_one_storage(device):
    storage = filled((2 * BLOCKS * 64,), device)
    return {f"l{i}": storage[i * BLOCKS * 64 : (i + 1) * BLOCKS * 64].view(BLOCKS, 8, 8) for i in range(2)}


def four_byte_items(device):
    return {"l0": filled((BLOCKS, 2, 4, 32), device).view(torch.float32)}


FORMS = [
    blocks_outermost,
    planes_outermost,
    heads_before_blocks,
    interleaved_layers,
    padded_blocks,
    kernel_blocks,
    two_layers_in_one_storage,
    four_byte_items,
]


def block_of(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """One logical block by plain indexing, in ascending address order, as bytes."""
    dim = 0 if tensor.shape[0] % BLOCKS == 0 and tensor.shape[0] >= BLOCKS else 1
    ratio = tensor.shape[dim] // BLOCKS
    part = tensor.narrow(dim, block * ratio, ratio)
    order = sorted(range(part.dim()), key=lambda d: -part.stride(d))
    return part.permute(order).contiguous().flatten().cpu().view(torch.uint8)


def expected_object(caches: dict[str, torch.Tensor], block: int) -> torch.Tensor:
    return torch.cat([block_of(t, block) for t in caches.values()])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
def test_gather_reads_exactly_the_blocks_bytes(form, device):
    caches = form(device)
    layout = CacheLayout.from_tensors(caches, BLOCKS)
    wanted = [4, 0, 3]
    out = torch.empty((3, layout.object_bytes), dtype=torch.uint8)

    layout.gather(wanted, out)

    for row, block in zip(out, wanted, strict=True):
        assert torch.equal(row, expected_object(caches, block))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
def test_scatter_writes_the_blocks_and_not_a_byte_beside_them(form, device):
    source, target = form(device), form(device)
    layout = CacheLayout.from_tensors(target, BLOCKS)
    storages = {t.untyped_storage().data_ptr(): t for t in target.values()}
    for tensor in storages.values():
        torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage()).fill_(255)
    objects = torch.stack([expected_object(source, b) for b in (5, 2)])

    layout.scatter([5, 2], objects)

    for block in range(BLOCKS):
        got = expected_object(target, block)
        want = expected_object(source, block) if block in (5, 2) else torch.full_like(got, 255)
        assert torch.equal(got, want)
    touched = sum(
        int((torch.empty(0, dtype=torch.uint8, device=device).set_(t.untyped_storage()) != 255).sum())
        for t in storages.values()
    )
    assert touched == 2 * layout.object_bytes


@pytest.mark.parametrize("form", FORMS)
def test_direct_segments_are_the_same_bytes_in_the_same_order(form):
    caches = form("cpu")
    layout = CacheLayout.from_tensors(caches, BLOCKS)
    all_pointers, all_sizes = layout.segments(range(BLOCKS))
    for block, pointers, sizes in zip(range(BLOCKS), all_pointers, all_sizes, strict=True):
        raw = b"".join(ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True))
        assert raw == expected_object(caches, block).numpy().tobytes()
        regions = layout.regions()
        assert all(
            any(base <= p and p + n <= base + size for base, size in regions)
            for p, n in zip(pointers, sizes, strict=True)
        )


def test_layers_that_share_one_cache_count_once():
    caches = blocks_outermost("cpu")
    caches["shared"] = caches["l0"]
    assert len(CacheLayout.from_tensors(caches, BLOCKS).layers) == 3


def test_neighbours_in_memory_are_one_segment():
    assert CacheLayout.from_tensors(interleaved_layers("cpu"), BLOCKS).segments_per_object == 1
    assert CacheLayout.from_tensors(two_layers_in_one_storage("cpu"), BLOCKS).segments_per_object == 2
    assert CacheLayout.from_tensors(planes_outermost("cpu"), BLOCKS).segments_per_object == 4


def test_each_storage_is_one_region():
    assert len(CacheLayout.from_tensors(interleaved_layers("cpu"), BLOCKS).regions()) == 1


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_no_address_outside_the_pool_is_computed(block):
    layout = CacheLayout.from_tensors(blocks_outermost("cpu"), BLOCKS)
    out = torch.empty((1, layout.object_bytes), dtype=torch.uint8)
    with pytest.raises(IndexError, match="outside the pool"):
        layout.segments([block])
    with pytest.raises(IndexError, match="outside the pool"):
        layout.gather([block], out)
    with pytest.raises(IndexError, match="outside the pool"):
        layout.scatter([block], out)


def test_unknown_form_is_an_error_that_names_the_layer():
    with pytest.raises(ConfigError, match=r"kv_caches\['odd'\]"):
        CacheLayout.from_tensors({"odd": torch.empty(4, 5, 7)}, BLOCKS)


def test_overlapping_elements_are_refused():
    overlapping = torch.as_strided(torch.empty(100), (BLOCKS, 4, 4), (10, 2, 1))
    with pytest.raises(ConfigError, match="overlap"):
        CacheLayout.from_tensors({"l": overlapping}, BLOCKS)
