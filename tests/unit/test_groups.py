"""Cache groups: what a plan says of a model that is supported, and each refusal of one that is not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from kvledger.errors import ConfigError
from kvledger.groups import GroupPlan, plan_groups

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=64)
HASHES = [bytes([i]) for i in range(8)]


def make_plan(
    *,
    specs: Sequence[KVCacheSpec] = (FULL,),
    max_model_len: int = 100,
    hash_block_size: int | None = None,
    **parallel: int,
) -> GroupPlan:
    """The plan for a pool of 50 blocks; `parallel` sets fields of vLLM's ParallelConfig."""
    groups = [KVCacheGroupSpec([f"layer{i}", f"other{i}"], spec) for i, spec in enumerate(specs)]
    cache = KVCacheConfig(50, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=hash_block_size)
    config = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel), model_config=SimpleNamespace(max_model_len=max_model_len)
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
