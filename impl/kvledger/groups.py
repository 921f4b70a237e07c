"""Cache groups: what is stored, what a hit needs. Today: exactly one full-attention group per model.

Everything that this version cannot do right is refused at start, naming the setting and what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The one group: `block_size` tokens per block, `hashes_per_block` vLLM hashes per block (the last one names
    it)."""

    block_size: int
    hashes_per_block: int
    layer_names: tuple[str, ...]
    num_blocks: int
    num_ranks: int
    max_blocks_per_request: int

    def block_hashes(self, hashes: list[bytes], start: int, stop: int) -> list[bytes]:
        """Hashes that name blocks `start` … `stop - 1`; hashes chain, so the last sub-hash covers the block."""
        step = self.hashes_per_block
        return [bytes(h) for h in hashes[(start + 1) * step - 1 : stop * step : step]]


def _is_stored(group: "KVCacheGroupSpec") -> bool:
    """Whether the KV of this group is a function of the tokens alone, so that vLLM reuses it by their hashes.

    The exact types, not what is derived from them: R-SWA caches and hidden states are full attention to vLLM's memory
    planning, and depend on more.
    """
    from vllm.v1 import kv_cache_interface

    # getattr: not every supported release has each of them, or each of the marks
    names = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
    spec = group.kv_cache_spec
    return (
        type(spec) in [getattr(kv_cache_interface, name, None) for name in names]
        and getattr(spec, "prefix_cacheable", True)
        and not getattr(spec, "non_causal", False)
        and getattr(group, "enable_kv_transfer", True)
    )


def _kind(group: "KVCacheGroupSpec") -> str:
    causal = "" if not getattr(group.kv_cache_spec, "non_causal", False) else " (non-causal)"
    return type(group.kv_cache_spec).__name__ + causal


def plan_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> GroupPlan:
    """Check that the model and the parallel layout are supported.

    Raises:
        ConfigError: several cache groups, a group that is not full attention or that vLLM does not reuse, prefix caching
            switched off, or a parallel mode that is not supported.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not _is_stored(groups[0]):
        kinds = [_kind(group) for group in groups]
        raise ConfigError(
            field="model",
            value=kinds,
            remedy="kvledger stores models with one full-attention KV cache group that vLLM itself reuses "
            "(FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec); serve this model without it, or try "
            "--disable-hybrid-kv-cache-manager for sliding-window models",
        )
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                field=name, value=getattr(parallel, name), remedy="only 1 is supported; use tensor parallelism"
            )
    block_size = groups[0].kv_cache_spec.block_size
    hash_block_size = kv_cache_config.hash_block_size or block_size
    if block_size % hash_block_size:
        raise ConfigError(
            field="hash_block_size", value=hash_block_size, remedy=f"must divide the block size ({block_size})"
        )
    return GroupPlan(
        block_size=block_size,
        hashes_per_block=block_size // hash_block_size,
        layer_names=tuple(groups[0].layer_names),
        num_blocks=kv_cache_config.num_blocks,
        num_ranks=parallel.tensor_parallel_size,
        max_blocks_per_request=-(-vllm_config.model_config.max_model_len // block_size),
    )


def stored_layers(plan: GroupPlan, kv_caches: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The group's layers in the group's order.

    A layer outside the group that lies on a layer of the group (same address, same strides) shares its KV, as in
    Gemma 3n, and is stored with it.

    Raises:
        ConfigError: a layer outside the group has a cache of its own.
    """
    stored = {name: kv_caches[name] for name in plan.layer_names if name in kv_caches}
    places = {(tensor.data_ptr(), tensor.stride()) for tensor in stored.values()}
    others = [
        name
        for name, tensor in kv_caches.items()
        if name not in stored and (tensor.data_ptr(), tensor.stride()) not in places
    ]
    if others:
        raise ConfigError(
            field="kv_caches",
            value=sorted(others)[:4],
            remedy="layers with a cache of their own outside the KV cache group are not supported; serve this model "
            "without kvledger",
        )
    return stored
