"""Small model folders, and vLLM's own configuration of engines that would serve them: no device, no process."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvledger.config import load_settings
from kvledger.groups import plan_groups
from kvledger.namespace import namespace_facts
from kvledger_conformance.engine.compat import TINY_MODEL
from kvledger_conformance.engine.oracle import LAYERS

COMMIT_A, COMMIT_B = "a" * 40, "b" * 40
Change = Callable[[VllmConfig, KVCacheConfig], object]


def tensors(count: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a small model."""
    generator = torch.Generator().manual_seed(seed)
    return {f"model.layers.{i}.weight": torch.randn((64, 64), generator=generator) for i in range(count)}


def save_tensors(path: Path, seed: int) -> None:
    """A safetensors file of a small model."""
    save_file(tensors(seed=seed), path)


def make_model(
    folder: Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A folder with `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_MODEL, **(config or {})}))
    save_file(dict(weights or tensors()), folder / "model.safetensors", metadata)
    return folder


def make_snapshot(cache: Path, commit: str, *, name: str = "org/tiny") -> Path:
    """The Hub's local cache after a download: blobs, links to them, and `main`."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    blobs = make_model(home / "blobs" / commit)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    return snapshot


def make_adapter(folder: Path, *, scale: float = 1.0, alpha: int = 16, base: str = "base") -> Path:
    """A LoRA adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": alpha,
        "base_model_name_or_path": base,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    weights = {f"{name}_A.weight": torch.full((4, 64), scale), f"{name}_B.weight": torch.full((64, 4), 2 * scale)}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def engine_facts(
    model: Path | str, settings: Mapping[str, Any] | None = None, change: Change | None = None, **engine: Any
) -> dict[str, Any]:
    """The facts of an engine that serves `model`; `change` is what vLLM would have decided elsewhere than here."""
    config = EngineArgs(
        **{
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 64,
            "enforce_eager": True,
            **engine,
        }
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=2,
        head_size=32,
        dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config),
    )
    cache = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)])
    cache.kv_cache_layout = "LBNHC"
    if change is not None:
        change(config, cache)
    return namespace_facts(config, cache, plan_groups(config, cache), load_settings(settings or {}, {}))
