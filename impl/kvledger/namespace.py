"""The namespace fingerprint: everything that decides what the bytes under a key mean.

Both sides compute it alone, from the same configuration, so lookups and ranks always agree. Two engines with any
difference in it never see each other's objects.
"""

import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvledger.config import Settings
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace, fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def weights_identity(model: str) -> str:
    """A content digest of a local model folder: `config.json`, and size and samples of every weight file.

    Samples (16 × 64 KiB per file) make new weights under the old path a new namespace without reading them all. Empty
    for a model that is not a local folder: there the name and revision identify it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES or p.name == "config.json"):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as f:
            for i in range(_SAMPLES):
                f.seek(max(0, (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _cache_form(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What the attention backend makes of the cache's bytes beyond its shape (CPU kernels pack keys by instruction
    set)."""
    device = str(vllm_config.device_config.device_type)
    form: dict[str, Any] = {"device": device}
    if device == "cpu":
        form["machine"] = platform.machine()
        form["amx"] = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - vLLM asks the same
    attention = getattr(vllm_config, "attention_config", None)
    form["backend"] = str(getattr(attention, "backend", None))
    return form


def namespace_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", plan: GroupPlan, settings: Settings
) -> dict[str, Any]:
    """The facts behind the fingerprint, by name (logged at start at debug level)."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    local = weights_identity(model.model)
    return {
        "model": Path(model.model).name if local else model.model,
        "revision": "" if local else str(model.revision),
        "weights": settings.weights_version or local,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "kv_dtype": str(getattr(spec, "dtype", "")),
        "spec": type(spec).__name__,
        "heads": getattr(spec, "num_kv_heads", 0),
        "head_size": getattr(spec, "head_size", 0),
        "page_bytes": spec.page_size_bytes,
        "layers": plan.layer_names,
        "layout": str(kv_cache_config.kv_cache_layout),
        "block_size": plan.block_size,
        "hashes_per_block": plan.hashes_per_block,
        "hash": str(cache.prefix_caching_hash_algo),
        "tp": parallel.tensor_parallel_size,
        "form": _cache_form(vllm_config),
    }


def build_keys(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", plan: GroupPlan, settings: Settings
) -> KeySpace:
    """The key space of this engine."""
    facts = namespace_facts(vllm_config, kv_cache_config, plan, settings)
    return KeySpace(namespace=fingerprint(facts), cache_prefix=settings.cache_prefix)
