"""Which model: the facts of its weights and configuration that decide KV, from vLLM's settings and the files behind them.

vLLM's `hf_config` itself is no fact: model classes change it when they are built (DeepSeek's rope type, MiniMax' length,
…), so a rank would see another one than the scheduler. What it is made of is: the file, the overrides, and the
releases of vLLM and Transformers that fill in the rest.
"""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvledger.config import Settings
from kvledger.errors import ConfigError
from kvledger.identity.weights import FILE_FORMATS, served_files, weights_digest

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of config.json: where it came from and what the engine's own dtype replaces; nothing in a forward pass.
_VOLATILE = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
)
# Beside config.json: how weights are quantised, and how images become inputs.
_BESIDE = ("quant_config.json", "quantize_config.json", "hf_quant_config.json")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_LLAMA4_TEMPERATURE = 32768


def model_facts(model: "ModelConfig", load: "LoadConfig", settings: Settings) -> dict[str, Any]:
    """The facts of one model: the served one, or a draft.

    Raises:
        ConfigError: weights or overrides that nothing identifies, and no `weights_version` that says it by hand.
    """
    return {
        "weights": _weights(model, load, settings),
        "config": _config(model, load),
        "overrides": _overrides(model, settings),
        "architecture": getattr(model, "architecture", ""),
        "classes": getattr(model, "model_class_overrides", None) or {},
        "releases": {name: _release(name) for name in ("vllm", "transformers")},
        "quantization": [str(model.quantization), _plain(getattr(model, "quantization_config", None))],
        "dtype": str(model.dtype),
        "by_length": _by_length(model),
        "multimodal": _multimodal(model),
    }


# -- where it lies ---------------------------------------------------------


def hub_commit(model: "ModelConfig", download_dir: str | None) -> str:
    """The commit of a model of the Hub, named or as the snapshot folder that offline mode puts in its place; or ""."""
    path = Path(model.model)
    if path.exists():
        return snapshot_commit(path)
    # vLLM resolves a branch once, into a text that says the branch and knows the commit.
    for known in (getattr(model.revision, "resolved", None), model.revision):
        if _COMMIT.fullmatch(str(known)):
            return str(known)
    if not model.hf_config_path:
        known = getattr(model.hf_config, "_commit_hash", None)
        if known:
            return str(known)
    ref = _hub_folder(model.model, download_dir) / "refs" / str(model.revision or "main")
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""


def snapshot_commit(path: Path) -> str:
    """The commit of a snapshot folder in the Hub's local cache; "" for any other path."""
    inside = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.name if inside and _COMMIT.fullmatch(path.name) else ""


def _hub_folder(name: str, download_dir: str | None) -> Path:
    from huggingface_hub import constants

    return Path(download_dir or constants.HF_HUB_CACHE) / f"models--{name.partition(':')[0].replace('/', '--')}"


# -- weights ---------------------------------------------------------------


def _weights(model: "ModelConfig", load: "LoadConfig", settings: Settings) -> dict[str, Any]:
    """By content, or by commit; `weights_version` adds to it."""
    load_format = str(load.load_format)
    facts: dict[str, Any] = {"version": settings.weights_version or ""}
    if load_format == "dummy":
        return {**facts, "dummy": True}
    full = settings.weights_digest == "full"
    path = Path(model.model)
    remote = getattr(model, "model_weights", "")  # an object store's address; `model` is then a copy without weights
    if load_format not in FILE_FORMATS:
        facts["loader"] = [load_format, _loader_facts(load, full=full)]
    if remote:
        facts["address"] = remote
    else:
        facts |= _of_hub(model, load, full) or _of_path(path, load_format, full)
    if "content" not in facts and "commit" not in facts and not settings.weights_version:
        raise ConfigError(
            field="weights_version",
            value=None,
            remedy=f"nothing identifies the weights of {remote or model.model!r} (load_format {load_format}): no weight "
            "file here, no commit of the Hub; set weights_version to a name that changes whenever they do",
        )
    return facts


def _of_hub(model: "ModelConfig", load: "LoadConfig", full: bool) -> dict[str, Any]:
    """By commit; a file that someone put into the snapshot counts by content: the commit does not say it."""
    commit = hub_commit(model, load.download_dir)
    if not commit:
        return {}
    path = Path(model.model)
    snapshot = path if path.exists() else _hub_folder(model.model, load.download_dir) / "snapshots" / commit
    files = served_files(snapshot, str(load.load_format))
    counted = files if full else [p for p in files if not p.is_symlink()]
    facts: dict[str, Any] = {"commit": commit, "file": "" if path.exists() else model.model.partition(":")[2]}
    if load.load_format == "auto" and any(p.name.startswith("consolidated") for p in files):
        facts["consolidated"] = True
    return facts | ({"content": weights_digest(counted, full=full)} if counted else {})


def _of_path(path: Path, load_format: str, full: bool) -> dict[str, Any]:
    files = [path] if path.is_file() else served_files(path, load_format)
    return {"content": weights_digest(files, full=full)} if files else {}


def _loader_facts(load: "LoadConfig", *, full: bool) -> dict[str, Any]:
    """What a loader of its own kind is told; what it is told to read counts by content."""
    extra = load.model_loader_extra_config
    told = extra if isinstance(extra, dict) else {n: v for n, v in vars(extra).items() if not n.startswith("_")}
    facts: dict[str, Any] = {}
    for name, value in told.items():
        path = Path(value) if isinstance(value, str) and value else None
        if path is not None and path.exists():
            files = [path] if path.is_file() else served_files(path, "")
            facts[name] = weights_digest(files, full=full)
        else:
            facts[name] = _plain(value)
    return facts


# -- configuration ---------------------------------------------------------


def _config(model: "ModelConfig", load: "LoadConfig") -> dict[str, Any]:
    """Digests of the files that configure the model; of the Hub's, the commit."""
    path = Path(model.hf_config_path or model.model)
    facts: dict[str, Any] = {}
    if path.is_dir() and not snapshot_commit(path):
        for name in ("config.json", "params.json"):
            if (path / name).is_file():
                facts[name] = _digest_json(_stable(json.loads((path / name).read_text(encoding="utf-8"))))
    elif path.is_file():
        facts["file"] = ""  # a single file holds its configuration, and counts as weights
    elif model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None)
        commit = snapshot_commit(path) or getattr(revision, "resolved", None)
        commit = commit or getattr(model.hf_config, "_commit_hash", None)
        facts["file"] = str(commit or _digest_json(_stable(model.hf_config.to_dict())))
    else:
        facts["file"] = hub_commit(model, load.download_dir) or _digest_json(_stable(model.hf_config.to_dict()))
    home = Path(model.model)
    if home.is_dir() and not snapshot_commit(home):
        names = [*_BESIDE, *(_PROCESSORS if getattr(model, "multimodal_config", None) else ())]
        code = sorted(p.name for p in home.glob("*.py")) if model.trust_remote_code else []
        for name in [n for n in names if (home / n).is_file()] + code:
            facts[name] = hashlib.sha256((home / name).read_bytes()).hexdigest()[:16]
    return facts


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _VOLATILE}


def _overrides(model: "ModelConfig", settings: Settings) -> dict[str, Any]:
    """`hf_overrides`, without those that say what a local config.json says anyway.

    Raises:
        ConfigError: a function, which only `weights_version` can name.
    """
    overrides = model.hf_overrides
    if callable(overrides):
        if getattr(model, "runner", "") == "draft" or settings.weights_version:
            return {"function": getattr(overrides, "__qualname__", "")}
        raise ConfigError(
            field="hf_overrides",
            value=getattr(overrides, "__qualname__", repr(overrides)),
            remedy="what a function changes cannot be seen from outside; give a dict, or set weights_version to a name "
            "that changes whenever the function does",
        )
    said = Path(model.hf_config_path or model.model, "config.json")
    file = json.loads(said.read_text(encoding="utf-8")) if said.is_file() and not snapshot_commit(said.parent) else {}
    return {k: _plain(v) for k, v in overrides.items() if k not in file or file[k] != v}


def _by_length(model: "ModelConfig") -> dict[str, bool]:
    """What `max_model_len` selects in the forward pass; beyond this it decides no byte."""
    facts: dict[str, bool] = {}
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if original and "longrope" in str(rope):
        facts["long_rope"] = model.max_model_len > original
    if "Llama4" in str(getattr(model, "architecture", "")):
        chosen = (model.override_generation_config or {}).get("attn_temperature_tuning")
        facts["temperature"] = bool(model.max_model_len > _LLAMA4_TEMPERATURE if chosen is None else chosen)
    return facts


def _multimodal(model: "ModelConfig") -> dict[str, Any]:
    """What the engine does to images and the like before the model sees them; the items are in the block hash."""
    chosen = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
    values = {name: getattr(chosen, name, None) for name in names} if chosen is not None else {}
    return {name: _plain(value) for name, value in values.items() if value}


def _digest_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _release(package: str) -> str:
    """Release of a package, without its last number; vLLM's CPU build counts as vLLM."""
    for name in (package, f"{package}-cpu"):
        try:
            return ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
