"""The namespace fingerprint: everything that decides what the bytes under a key mean.

Both sides compute it alone, from the same configuration and the same files, so lookups and ranks always agree. Two
engines with any difference in it never see each other's objects. `docs/identity.md` says which fact stands for what.
"""

import dataclasses
import json
import logging
import os
import platform
from typing import TYPE_CHECKING, Any

import torch

from kvledger.config import Settings
from kvledger.groups import GroupPlan
from kvledger.identity.model import model_facts
from kvledger.keys import KeySpace, fingerprint

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logging.getLogger(__name__)

# Names for the model's own type, and for one type: the spec says which it is.
_PLAIN_CACHE = ("auto", "float16", "bfloat16", "float32", "half", "float")
_FP8_E4M3 = ("fp8", "fp8_e4m3")


def _cache(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    """How the cache stores numbers: the resolved spec and layout, the type, and the platform's form of FP8."""
    from vllm.platforms import current_platform

    cache, attention = vllm_config.cache_config, vllm_config.attention_config
    chosen = str(cache.cache_dtype)
    dtype = "" if chosen in _PLAIN_CACHE else "fp8_e4m3" if chosen in _FP8_E4M3 else chosen
    return {
        "spec": _spec(kv_cache_config.kv_cache_groups[0].kv_cache_spec),
        "layout": str(kv_cache_config.kv_cache_layout),
        "dtype": dtype,
        "fp8": str(current_platform.fp8_dtype()) if dtype else "",
        "skipped_layers": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", ()))),
        "runtime_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "indexer": str(getattr(attention, "indexer_kv_dtype", "auto")),
    }


def _spec(spec: "KVCacheSpec") -> dict[str, str]:
    """Every field of the spec that vLLM made for the layers, whichever setting led to it."""
    return {"kind": type(spec).__name__} | {f.name: str(getattr(spec, f.name)) for f in dataclasses.fields(spec)}


def _machine(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What platform and kernels make of the cache's bytes beyond spec and layout.

    Elsewhere than on ROCm vLLM's own backends keep what spec and layout say, so that choosing one explicitly changes
    nothing. On ROCm they pack keys in ways of their own.
    """
    from vllm.platforms import current_platform

    facts: dict[str, Any] = {"platform": str(current_platform.device_name)}
    if vllm_config.device_config.device_type == "cpu":  # the CPU kernels pack keys by instruction set
        facts |= {"machine": platform.machine(), "amx": torch.cpu._is_amx_tile_supported()}  # noqa: SLF001 - as vLLM
    backend = getattr(vllm_config.attention_config.backend, "name", "")
    if current_platform.is_rocm():
        facts |= {"backend": backend, "environment": {n: v for n, v in os.environ.items() if "VLLM_ROCM" in n}}
    elif backend == "CUSTOM":
        facts["backend"] = str(vllm_config.attention_config.backend.get_path())
    return facts


def _draft(speculative: "SpeculativeConfig | None", vllm_config: "VllmConfig", settings: Settings) -> dict[str, Any]:
    """The draft model, where it has KV of its own beside the served model's; nothing for n-grams and the like."""
    if speculative is None or not speculative.uses_draft_kv_cache():
        return {}
    load = speculative.draft_load_config or vllm_config.load_config
    return {
        "method": str(speculative.method),
        "parallel": bool(getattr(speculative, "parallel_drafting", False)),
        "model": model_facts(speculative.draft_model_config, load, settings),
    }


def _adapters(vllm_config: "VllmConfig") -> dict[str, Any]:
    """How every adapter is applied, where that is not the default; which one it is, is in the names of its blocks."""
    lora = vllm_config.lora_config
    if lora is None:
        return {}
    defaults = {
        "lora_dtype": vllm_config.model_config.dtype,
        "target_modules": None,
        "enable_mixed_moe_lora_format": False,
    }
    values = {name: getattr(lora, name, default) for name, default in defaults.items()}
    return {name: str(value) for name, value in values.items() if value not in (defaults[name], "auto")}


def _others(vllm_config: "VllmConfig") -> dict[str, str]:
    """Parts of vLLM that change a forward pass where they are on, and what platform plugins are told."""
    names = ("engram_config", "diffusion_config", "additional_config")
    return {name: str(value) for name in names if (value := getattr(vllm_config, name, None))}


def namespace_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", plan: GroupPlan, settings: Settings
) -> dict[str, Any]:
    """The facts behind the fingerprint, by name.

    Raises:
        ConfigError: see `model_facts`.
    """
    return model_facts(vllm_config.model_config, vllm_config.load_config, settings) | {
        "cache": _cache(vllm_config, kv_cache_config),
        "layers": plan.layer_names,
        "blocks": [plan.block_size, plan.hashes_per_block, str(vllm_config.cache_config.prefix_caching_hash_algo)],
        "tp": vllm_config.parallel_config.tensor_parallel_size,
        "machine": _machine(vllm_config),
        "draft": _draft(vllm_config.speculative_config, vllm_config, settings),
        "adapters": _adapters(vllm_config),
        "others": _others(vllm_config),
    }


def build_keys(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", plan: GroupPlan, settings: Settings
) -> KeySpace:
    """The key space of this engine. Logs a digest per fact, so that engines that should share can be compared."""
    facts = namespace_facts(vllm_config, kv_cache_config, plan, settings)
    namespace = fingerprint(facts)
    digests = " ".join(f"{name}={fingerprint({name: value})[:8]}" for name, value in facts.items() if value)
    logger.info("kvledger: namespace %s of %s", namespace, digests)
    logger.debug("kvledger: facts of namespace %s: %s", namespace, json.dumps(facts, default=str))
    return KeySpace(namespace=namespace, cache_prefix=settings.cache_prefix)
