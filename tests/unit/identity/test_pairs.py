"""Same name, other bytes: another namespace. Other name, same bytes: the same one. Real files, vLLM's own configuration.

Each pair says which fact tells it apart; without that fact the two would collide, which is the pair's own control.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from vllm.platforms import current_platform

from kvledger.errors import ConfigError
from kvledger.keys import fingerprint
from tests.unit.identity.engines import (
    COMMIT_A,
    COMMIT_B,
    engine_facts,
    make_model,
    make_snapshot,
    save_tensors,
    tensors,
)

Facts = dict[str, Any]
Pair = Callable[[Path, pytest.MonkeyPatch], tuple[Facts, Facts]]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 100000}
LONG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "pad_token_id": 0,
    "eos_token_id": 2,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
}
DIFFERENT: list[tuple[str, str, Pair]] = []
EQUAL: list[tuple[str, Pair]] = []


def other_bytes(fact: str) -> Callable[[Pair], Pair]:
    """Two engines under one name that compute different KV; `fact` is what tells."""

    def enter(pair: Pair) -> Pair:
        DIFFERENT.append((pair.__name__, fact, pair))
        return pair

    return enter


def same_bytes(pair: Pair) -> Pair:
    """Two engines that compute the same KV under different names."""
    EQUAL.append((pair.__name__, pair))
    return pair


# -- same name, other bytes: configuration ---------------------------------


@other_bytes("overrides")
def yarn_by_override(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, hf_overrides={"rope_parameters": YARN})


@other_bytes("overrides")
def rope_theta_by_override(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(
        m, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )


@other_bytes("config")
def norm_epsilon_in_the_file(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(make_model(m, config={"rms_norm_eps": 1e-5}))


@other_bytes("config")
def configuration_of_another_folder(tmp, _):
    m, other = make_model(tmp / "m"), make_model(tmp / "o", config={"rms_norm_eps": 1e-5})
    return engine_facts(m), engine_facts(m, hf_config_path=str(other))


@other_bytes("by_length")
def long_factors_by_max_model_len(tmp, _):
    m = make_model(tmp / "m", config=LONG)
    return engine_facts(m, max_model_len=64), engine_facts(m, max_model_len=256)


@other_bytes("config")
def quantisation_beside_the_configuration(tmp, _):
    m = make_model(tmp / "m")
    file = m / "quantize_config.json"
    file.write_text('{"bits": 8, "group_size": 128}')
    before = engine_facts(m)
    file.write_text('{"bits": 8, "group_size": 64}')
    return before, engine_facts(m)


@other_bytes("config")
def code_beside_the_configuration(tmp, _):
    m = make_model(tmp / "m")
    (m / "modeling_tiny.py").write_text("SCALE = 1\n")
    before = engine_facts(m, trust_remote_code=True)
    (m / "modeling_tiny.py").write_text("SCALE = 2\n")
    return before, engine_facts(m, trust_remote_code=True)


@other_bytes("architecture")
def implementation_of_transformers(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, model_impl="transformers")


@other_bytes("quantization")
def quantised_while_loading(tmp, _):
    m = make_model(tmp / "m")

    def fp8(config, _):
        config.model_config.quantization = "fp8"

    return engine_facts(m), engine_facts(m, change=fp8)


@other_bytes("dtype")
def dtype_of_the_model(tmp, _):
    m = make_model(tmp / "m")

    def narrow(config, _):  # the cache's own type left as it is
        config.model_config.dtype = torch.bfloat16

    return engine_facts(m), engine_facts(m, change=narrow)


@other_bytes("releases")
def release_of_the_engine(tmp, monkeypatch):
    m = make_model(tmp / "m")
    before = engine_facts(m)
    monkeypatch.setattr("kvledger.identity.model._release", lambda package: f"{package} of another day")
    return before, engine_facts(m)


# -- same name, other bytes: weights ---------------------------------------


def changed(tmp: Path, change: Callable[[Path], object], **engine: Any) -> tuple[Facts, Facts]:
    m = make_model(tmp / "m")
    before = engine_facts(m, **engine)
    change(m)
    return before, engine_facts(m, **engine)


@other_bytes("weights")
def layers_in_the_middle(tmp, _):
    """Half of the layers: those that 16 samples of 64 KiB, evenly over the file, do not touch."""
    every = {f"model.layers.{i:02}.weight": torch.full((128 * 1024,), float(i)) for i in range(60)}
    m = make_model(tmp / "m", weights=every)
    before = engine_facts(m)
    inner = {n: t + 1 if int(n.split(".")[2]) % 4 in (1, 2) else t for n, t in every.items()}
    return before, engine_facts(make_model(m, weights=inner))


@other_bytes("weights")
def a_mebibyte_in_a_large_tensor(tmp, _):
    m = make_model(tmp / "m", weights={"w": torch.zeros(8 * 1024**2)})
    before = engine_facts(m)
    with (m / "model.safetensors").open("r+b") as f:
        f.seek(16_000_003)
        f.write(b"\x01" * 1024**2)
    return before, engine_facts(m)


@other_bytes("weights")
def two_tensors_swapped(tmp, _):
    swapped = tensors()
    a, b = "model.layers.3.weight", "model.layers.4.weight"
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return changed(tmp, lambda m: make_model(m, weights=swapped))


@other_bytes("weights")
def same_bits_under_another_type(tmp, _):
    return changed(tmp, lambda m: make_model(m, weights={n: t.view(torch.int32) for n, t in tensors().items()}))


@other_bytes("weights")
def metadata_of_the_file(tmp, _):
    return changed(tmp, lambda m: make_model(m, metadata={"format": "pt", "torchao": "int8"}))


@other_bytes("weights")
def another_shard_by_the_index(tmp, _):
    m = make_model(tmp / "m")
    (m / "model.safetensors").rename(m / "one.safetensors")
    save_file(tensors(seed=1), m / "two.safetensors")
    index = m / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "one.safetensors")}))
    before = engine_facts(m)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "two.safetensors")}))
    return before, engine_facts(m)


def only(name: str, write: Callable[[Path, int], object]) -> Pair:
    def pair(tmp, _):
        m = make_model(tmp / "m")
        (m / "model.safetensors").unlink()
        (m / name).parent.mkdir(exist_ok=True)
        write(m / name, 0)
        before = engine_facts(m)
        write(m / name, 1)
        return before, engine_facts(m)

    return pair


def save_archive(path: Path, seed: int) -> None:
    torch.save(tensors(seed=seed), path)


def save_old(path: Path, seed: int) -> None:
    torch.save(tensors(seed=seed), path, _use_new_zipfile_serialization=False)


def save_bytes(path: Path, seed: int) -> None:
    path.write_bytes(b"head" + bytes([seed]) * 70_000)


for name, write in {
    "pytorch_model.bin": save_archive,
    "model.pt": save_old,
    "model.pth": save_archive,
    "model.tensors": save_bytes,
    "part/model.safetensors": save_tensors,
    "part/model.pth": save_bytes,
}.items():
    DIFFERENT.append((f"only_{name}", "weights", only(name, write)))


@other_bytes("weights")
def a_single_gguf_file(tmp, _):
    m, file = make_model(tmp / "m"), tmp / "m.gguf"

    def serve_file(config, _):  # its loader is a plugin of vLLM
        config.model_config.model = str(file)

    save_bytes(file, 0)
    before = engine_facts(m, change=serve_file)
    save_bytes(file, 1)
    return before, engine_facts(m, change=serve_file)


@other_bytes("weights")
def version_by_hand_on_other_weights(tmp, _):
    m = make_model(tmp / "m")
    before = engine_facts(m, {"weights_version": "1"})
    return before, engine_facts(make_model(m, weights=tensors(seed=1)), {"weights_version": "1"})


@other_bytes("weights")
def version_by_hand(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m, {"weights_version": "1"}), engine_facts(m, {"weights_version": "2"})


@other_bytes("weights")
def shards_written_by_a_loader(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, load_format="sharded_state")


@other_bytes("weights")
def what_a_loader_is_told_to_read(tmp, _):
    m, file = make_model(tmp / "m"), tmp / "served.tensors"
    told: dict[str, Any] = {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": str(file)}}
    save_bytes(file, 0)
    before = engine_facts(m, **told)
    save_bytes(file, 1)
    return before, engine_facts(m, **told)


@other_bytes("weights")
def random_weights(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, load_format="dummy")


@other_bytes("weights")
def a_file_put_into_a_snapshot(tmp, _):
    snapshot = make_snapshot(tmp / "hub", COMMIT_A)
    before = engine_facts(snapshot)
    (snapshot / "model.safetensors").unlink()
    save_file(tensors(seed=1), snapshot / "model.safetensors")
    return before, engine_facts(snapshot)


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def online(config, _) -> None:
    """Where there is a network the Hub's name stays; offline vLLM puts the snapshot's folder in its place."""
    config.model_config.model = "org/tiny"


def without_config(one: Facts, other: Facts) -> tuple[Facts, Facts]:
    """The commit stands in both facts, weights and configuration."""
    assert one["config"] != other["config"]
    return {**one, "config": ""}, {**other, "config": ""}


@other_bytes("weights")
def a_push_to_the_hub(tmp, monkeypatch):
    use_cache(tmp / "hub", monkeypatch)
    make_snapshot(tmp / "hub", COMMIT_A)
    before = engine_facts("org/tiny", change=online)
    make_snapshot(tmp / "hub", COMMIT_B)
    return without_config(before, engine_facts("org/tiny", change=online))


@other_bytes("weights")
def commits_that_only_the_configuration_knows(tmp, _):
    def fetched(commit):
        def change(config, cache):
            online(config, cache)
            config.model_config.hf_config._commit_hash = commit

        return change

    m = make_model(tmp / "m")
    return without_config(engine_facts(m, change=fetched(COMMIT_A)), engine_facts(m, change=fetched(COMMIT_B)))


@other_bytes("weights")
def commits_that_were_asked_for(tmp, _):
    def at(commit):
        def change(config, cache):
            online(config, cache)
            config.model_config.revision = commit

        return change

    m = make_model(tmp / "m")
    return without_config(engine_facts(m, change=at(COMMIT_A)), engine_facts(m, change=at(COMMIT_B)))


# -- same name, other bytes: cache, machine, draft, adapters ---------------


@other_bytes("cache")
def type_of_the_cache(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m, kv_cache_dtype="fp8"), engine_facts(m, kv_cache_dtype="fp8_e5m2")


@other_bytes("cache")
def fp8_of_another_platform(tmp, monkeypatch):
    m = make_model(tmp / "m")
    before = engine_facts(m, kv_cache_dtype="fp8")
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda _: torch.float8_e4m3fnuz))
    return before, engine_facts(m, kv_cache_dtype="fp8")


@other_bytes("cache")
def layers_that_are_not_quantised(tmp, _):
    m = make_model(tmp / "m")

    def skip(config, _):
        config.cache_config.kv_cache_dtype_skip_layers = ["1"]

    return engine_facts(m, kv_cache_dtype="fp8"), engine_facts(m, kv_cache_dtype="fp8", change=skip)


@other_bytes("cache")
def layout(tmp, _):
    def blocks_first(_, cache):
        cache.kv_cache_layout = "BLHNC"

    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, change=blocks_first)


@other_bytes("machine")
def platform_of_the_engine(tmp, monkeypatch):
    m = make_model(tmp / "m")
    before = engine_facts(m)
    monkeypatch.setattr(type(current_platform), "device_name", "cuda")
    return before, engine_facts(m)


@other_bytes("machine")
def backend_of_a_plugin(tmp, _):
    def plugin(config, _):
        config.attention_config.backend = SimpleNamespace(name="CUSTOM", get_path=lambda: "elsewhere.Backend")

    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, change=plugin)


@other_bytes("tp")
def shards_of_heads(tmp, _):
    def two(config, _):
        config.parallel_config.tensor_parallel_size = 2

    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, change=two)


def draft(folder: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}}


@other_bytes("draft")
def draft_model_or_none(tmp, _):
    m, d = make_model(tmp / "m"), make_model(tmp / "d")
    return engine_facts(m), engine_facts(m, **draft(d))


@other_bytes("draft")
def weights_of_the_draft_model(tmp, _):
    m, d = make_model(tmp / "m"), make_model(tmp / "d")
    before = engine_facts(m, **draft(d))
    return before, engine_facts(m, **draft(make_model(d, weights=tensors(seed=1))))


@other_bytes("adapters")
def how_adapters_are_applied(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m, enable_lora=True), engine_facts(m, enable_lora=True, lora_dtype="bfloat16")


@other_bytes("others")
def what_a_platform_plugin_is_told(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, additional_config={"fused_rope": True})


# -- other name, same bytes ------------------------------------------------


@same_bytes
def another_folder(tmp, _):
    return engine_facts(make_model(tmp / "m")), engine_facts(make_model(tmp / "elsewhere" / "n"))


@same_bytes
def the_same_backend_explicitly(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, attention_backend="CPU_ATTN")


@same_bytes
def online_and_offline(tmp, monkeypatch):
    use_cache(tmp / "hub", monkeypatch)
    make_snapshot(tmp / "hub", COMMIT_A)
    return engine_facts("org/tiny"), engine_facts("org/tiny", change=online)


@same_bytes
def snapshots_of_two_hosts(tmp, _):
    return tuple(engine_facts(make_snapshot(tmp / host, COMMIT_A)) for host in ("a", "b"))


@same_bytes
def irrelevant_settings(tmp, _):
    m = make_model(tmp / "m")
    others: dict[str, Any] = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 777,
        "served_model_name": "other",
        "gpu_memory_utilization": 0.3,
        "seed": 7,
        "max_model_len": 96,
        "enable_lora": True,
    }
    return engine_facts(m), engine_facts(m, **others)


@same_bytes
def irrelevant_settings_of_ours(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, {"master_server_address": "10.0.0.7:50051", "staging_bytes": "512MiB"})


@same_bytes
def the_same_files_in_another_way(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, load_format="safetensors")


@same_bytes
def tensors_in_other_files(tmp, _):
    m, n = make_model(tmp / "m"), make_model(tmp / "n")
    (n / "model.safetensors").unlink()
    every = list(tensors().items())
    save_file(dict(every[:5]), n / "model-00001-of-00002.safetensors")
    save_file(dict(every[5:]), n / "model-00002-of-00002.safetensors", {"format": "pt"})
    return engine_facts(m), engine_facts(n)


@same_bytes
def the_cache_type_that_is_automatic_anyway(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m, dtype="bfloat16"), engine_facts(m, dtype="bfloat16", kv_cache_dtype="bfloat16")


@same_bytes
def two_names_of_fp8(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m, kv_cache_dtype="fp8"), engine_facts(m, kv_cache_dtype="fp8_e4m3")


@same_bytes
def an_override_that_says_what_the_file_says(tmp, _):
    m = make_model(tmp / "m")
    return engine_facts(m), engine_facts(m, hf_overrides={"max_position_embeddings": 4096})


@same_bytes
def where_the_configuration_came_from(tmp, _):
    m, n = make_model(tmp / "m"), make_model(tmp / "n", config={"_name_or_path": "x", "transformers_version": "4.1"})
    return engine_facts(m), engine_facts(n)


@same_bytes
def files_that_are_not_served(tmp, _):
    m, n = make_model(tmp / "m"), make_model(tmp / "n")
    (n / "README.md").write_text("new")
    (n / "tokenizer_config.json").write_text("{}")
    save_bytes(n / "pytorch_model.bin", 0)
    (n / ".cache").mkdir()
    save_bytes(n / ".cache" / "x.bin", 0)
    return engine_facts(m), engine_facts(n)


@same_bytes
def speculation_without_a_cache(tmp, _):
    m = make_model(tmp / "m")
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    return engine_facts(m), engine_facts(m, speculative_config=ngram)


# -- the matrix ------------------------------------------------------------


@pytest.mark.parametrize(("fact", "pair"), [p[1:] for p in DIFFERENT], ids=[p[0] for p in DIFFERENT])
def test_same_name_other_bytes(fact: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair(tmp_path, monkeypatch)
    assert fingerprint(one) != fingerprint(other)
    for facts in (one, other):
        del facts[fact]
    assert fingerprint(one) == fingerprint(other), f"something else than {fact} tells these two apart"


@pytest.mark.parametrize("pair", [p[1] for p in EQUAL], ids=[p[0] for p in EQUAL])
def test_other_name_same_bytes(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair(tmp_path, monkeypatch)
    assert one == other
    assert fingerprint(one) == fingerprint(other)


def test_the_matrix_is_as_large_as_promised() -> None:
    assert len(DIFFERENT) >= 20
    assert len(EQUAL) >= 8


# -- what cannot be identified ---------------------------------------------


def test_weights_that_nothing_identifies_are_refused(tmp_path: Path) -> None:
    m = make_model(tmp_path / "m")
    (m / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"weights_version = None.*nothing identifies the weights.*set weights_version"
    ):
        engine_facts(m)
    assert engine_facts(m, {"weights_version": "1"})["weights"] == {"version": "1"}


def shorter(config):
    config.rms_norm_eps = 1e-5
    return config


def test_an_override_by_function_needs_a_version(tmp_path: Path) -> None:
    m = make_model(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"hf_overrides = 'shorter'.*set weights_version"):
        engine_facts(m, hf_overrides=shorter)
    assert engine_facts(m, {"weights_version": "1"}, hf_overrides=shorter)["overrides"] == {"function": "shorter"}


# -- every process sees the same -------------------------------------------

IN_ANOTHER_PROCESS = """
import pickle, sys
from kvledger.config import load_settings
from kvledger.groups import plan_groups
from kvledger.keys import fingerprint
from kvledger.namespace import namespace_facts
config, cache = pickle.load(sys.stdin.buffer)
print(fingerprint(namespace_facts(config, cache, plan_groups(config, cache), load_settings({}, {}))))
"""


def test_a_rank_in_another_process_computes_the_same(tmp_path: Path) -> None:
    """Also after the model class has changed `hf_config` there, as DeepSeek's and others do when they are built."""
    sent: list[bytes] = []

    def send(config, cache):
        original = dict(config.model_config.hf_config.rope_parameters)
        config.model_config.hf_config.rope_parameters["rope_type"] = "deepseek_yarn"
        config.model_config.hf_config.max_model_len = 64
        sent.append(pickle.dumps((config, cache)))
        config.model_config.hf_config.rope_parameters.update(original)
        del config.model_config.hf_config.max_model_len

    facts = engine_facts(make_model(tmp_path / "m"), change=send)
    run = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], input=sent[0], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    assert run.stdout.decode().split()[-1] == fingerprint(facts)
