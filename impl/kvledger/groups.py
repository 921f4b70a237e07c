"""Cache groups: what is stored, what a hit needs. Today: exactly one full-attention group per model.

Everything that this version cannot do right is refused at start, naming the setting and what to do.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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


def plan_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> GroupPlan:
    """Check that the model and the parallel layout are supported.

    Raises:
        ConfigError: several cache groups, a group that is not full attention, or a parallel mode that is not supported.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = [type(g.kv_cache_spec).__name__ for g in groups]
        raise ConfigError(
            field="model",
            value=kinds,
            remedy="kvledger stores models with one full-attention KV cache group; serve this model without it, or try "
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
