"""Cache groups: what a plan says of a model that is supported, and each refusal of one that is not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvledger.errors import ConfigError
from kvledger.groups import GroupPlan, plan_groups, stored_layers
from kvledger.worker.layout import CacheLayout

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=64)
UNIFORM = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer0": FULL, "other0": FULL})
HASHES = [bytes([i]) for i in range(8)]


def make_plan(
    *,
    specs: Sequence[KVCacheSpec] = (FULL,),
    max_model_len: int = 100,
    hash_block_size: int | None = None,
    transfer: bool = True,
    **parallel: int,
) -> GroupPlan:
    """The plan for a pool of 50 blocks; `parallel` sets fields of vLLM's ParallelConfig."""
    groups = [
        KVCacheGroupSpec([f"layer{i}", f"other{i}"], spec, enable_kv_transfer=transfer) for i, spec in enumerate(specs)
    ]
    cache = KVCacheConfig(50, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=hash_block_size)
    config = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )
    return plan_groups(config, cache)


def test_a_model_with_one_full_attention_group():
    assert make_plan() == GroupPlan(
        block_size=16,
        hashes_per_block=1,
        layer_names=("layer0", "other0"),
        num_blocks=50,
        num_ranks=1,
        max_blocks_per_request=7,
    )


@pytest.mark.parametrize(
    "spec",
    [FULL, MLAAttentionSpec(**SHAPE), SinkFullAttentionSpec(**SHAPE, sink_len=16)],
    ids=lambda s: type(s).__name__,
)
def test_what_vllm_reuses_by_prefix_is_stored(spec):
    assert make_plan(specs=[spec]).layer_names == ("layer0", "other0")


def test_ranks_are_those_of_tensor_parallelism():
    assert make_plan(tensor_parallel_size=4).num_ranks == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2)])
def test_the_longest_request_takes_whole_blocks(tokens, blocks):
    assert make_plan(max_model_len=tokens).max_blocks_per_request == blocks


@pytest.mark.parametrize(("hash_block_size", "per_block"), [(None, 1), (16, 1), (8, 2), (4, 4)])
def test_a_block_is_named_by_its_last_hash(hash_block_size, per_block):
    plan = make_plan(hash_block_size=hash_block_size)
    assert plan.hashes_per_block == per_block
    blocks = [HASHES[i] for i in range(per_block - 1, 8, per_block)]
    assert plan.block_hashes(HASHES, 0, 8 // per_block) == blocks
    assert plan.block_hashes(HASHES, 1, 2) == blocks[1:2]
    assert plan.block_hashes(HASHES, 1, 1) == []


@pytest.mark.parametrize(
    ("given", "field", "value", "remedy"),
    [
        ({"specs": [SLIDING]}, "model", ["SlidingWindowSpec"], "--disable-hybrid-kv-cache-manager"),
        ({"specs": [FULL, SLIDING]}, "model", ["FullAttentionSpec", "SlidingWindowSpec"], "one full-attention"),
        ({"specs": [FULL, FULL]}, "model", ["FullAttentionSpec"] * 2, "serve this model without it"),
        ({"specs": [RSWASpec(**SHAPE, rswa_window=32)]}, "model", ["RSWASpec"], "that vLLM itself reuses"),
        ({"specs": [HiddenStateCacheSpec(**SHAPE)]}, "model", ["HiddenStateCacheSpec"], "that vLLM itself reuses"),
        (
            {"specs": [FullAttentionSpec(**SHAPE, non_causal=True)]},
            "model",
            ["FullAttentionSpec (non-causal)"],
            "reuses",
        ),
        ({"specs": [UNIFORM]}, "model", ["UniformTypeKVCacheSpecs"], "FullAttentionSpec, MLAAttentionSpec"),
        ({"transfer": False}, "model", ["FullAttentionSpec"], "that vLLM itself reuses"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", 2, "use tensor parallelism"),
        ({"prefill_context_parallel_size": 3}, "prefill_context_parallel_size", 3, "use tensor parallelism"),
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
            "decode_context_parallel_size",
            2,
            "only 1 is supported",
        ),
        ({"hash_block_size": 5}, "hash_block_size", 5, "divide the block size (16)"),
        ({"hash_block_size": 32}, "hash_block_size", 32, "divide the block size (16)"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_a_remedy(given, field, value, remedy):
    with pytest.raises(ConfigError) as refusal:
        make_plan(**given)
    assert (refusal.value.field, refusal.value.value) == (field, value)
    assert remedy in refusal.value.remedy


def test_layers_that_share_kv_are_stored_once_with_the_layer_that_owns_it():
    """Gemma 3n: vLLM hands over the shared layers, too; they are views of their targets and in no group."""
    storage = torch.arange(2 * 50 * 16, dtype=torch.float32).view(2, 50, 16)
    caches = {"shared0": storage[0], "other0": storage[1], "layer0": storage[0], "shared1": storage[1][:]}
    stored = stored_layers(make_plan(), caches)
    assert list(stored) == ["layer0", "other0"]
    assert all(stored[name] is caches[name] for name in stored)
    assert CacheLayout.from_tensors(stored, 50).object_bytes == 2 * 16 * 4


@pytest.mark.parametrize("foreign", [torch.zeros(50, 16), torch.zeros(16, 50).T])
def test_a_layer_with_a_cache_of_its_own_outside_the_group_is_refused(foreign):
    caches = {"layer0": torch.zeros(50, 16), "other0": torch.zeros(50, 16), "draft.0": foreign}
    with pytest.raises(ConfigError, match=r"kv_caches = \['draft.0'\]: layers with a cache of their own"):
        stored_layers(make_plan(), caches)


def test_other_strides_on_the_same_address_are_no_shared_layer():
    storage = torch.zeros(50, 50)
    caches = {"layer0": storage, "other0": torch.zeros(50, 50), "draft.0": storage.T}
    with pytest.raises(ConfigError, match="draft"):
        stored_layers(make_plan(), caches)
