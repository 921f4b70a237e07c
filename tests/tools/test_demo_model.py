"""The demo's model folder: making it is told in two lines, and heads may be added without changing the function."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo.model import pad_heads

ROOT = Path(__file__).resolve().parents[2]
# What the conversion does as far as a person sees it: it imports Triton (by way of transformers) and shows its progress.
MAKE = """
import sys
from pathlib import Path
from demo import model

def make():
    import triton._C.libtriton
    from tqdm.auto import tqdm
    list(tqdm(range(2)))
    folder.mkdir()
    (folder / "config.json").touch()

folder = Path(sys.argv[1])
model.once(folder, make, print)
model.once(folder, make, print)
"""


def test_making_the_folder_shows_no_bars_and_no_leaks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path / "tiny")]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(r"making the model folder tiny \(once\) …\nmade the model folder in \d+ s\n", run.stdout)


def test_a_group_of_zero_heads_leaves_the_function_as_it_is() -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    plain = LlamaForCausalLM(
        LlamaConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=2, vocab_size=99, **heads)
    )
    config, weights = pad_heads(plain.config, plain.state_dict())
    wider = LlamaForCausalLM(config)
    wider.load_state_dict(weights)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    tokens = torch.arange(20).reshape(1, -1)
    with torch.inference_mode():
        assert torch.allclose(wider(tokens).logits, plain(tokens).logits, atol=1e-6)
