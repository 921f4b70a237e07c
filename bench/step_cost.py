"""What a connector adds to one decode step on the scheduler's thread, by number of running requests.

Both connectors in one run, interleaved, around vLLM's real scheduler; no model, no store (lookups off). Per step:
time in `build_connector_meta` (median) and bytes of pickled metadata sent to every rank. Figures depend on the
machine; the ratio is the point.

    .venv/bin/python -m bench.step_cost [--requests 128 512 1024] [--steps 50] [--json FILE]
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.metadata import LedgerMetadata
from kvledger.mooncake.embedded import running_embedded
from kvledger.protocol import Report, Result

BLOCK = 32
PROMPT_TOKENS = 3 * BLOCK
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def make_scheduler(model: Path, connector: str, extra: dict[str, Any], requests: int) -> Scheduler:
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=1024,
        max_num_seqs=requests,
        max_num_batched_tokens=max(4096, requests * PROMPT_TOKENS),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={**extra, "enable_lookup": False}
        ),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["l0", "l1"], spec)]
    blocks = requests * 8 + 1
    config.cache_config.num_gpu_blocks = blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


class Bench:
    """One scheduler full of decoding requests."""

    def __init__(self, scheduler: Scheduler, requests: int) -> None:
        self.scheduler = scheduler
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        hasher = get_request_block_hasher(BLOCK, sha256)
        params = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True)
        for i in range(requests):
            prompt = [3 + (i * 7 + k) % 500 for k in range(PROMPT_TOKENS)]
            scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
        build = scheduler.connector.build_connector_meta

        def timed(output: Any) -> Any:
            begin = time.perf_counter()
            metadata = build(output)
            self.seconds.append(time.perf_counter() - begin)
            self.bytes.append(len(pickle.dumps(metadata)))
            return metadata

        scheduler.connector.build_connector_meta = timed

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.answer(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        tokens = [[7] for _ in ids]
        index = {r: i for i, r in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, index, tokens))

    def answer(self, metadata: Any) -> None:
        """What a fast rank reports: every store job is done (only kvledger issues any in these steps)."""
        if isinstance(metadata, LedgerMetadata):
            side = self.scheduler.connector.scheduler_side
            side.apply_reports(Report(job_id=j.job_id, rank=0, result=Result.DONE) for j in metadata.plan.jobs)


def measure(model: Path, address: str, requests: int, steps: int) -> dict[str, dict[str, float]]:
    kvledger = {"master_server_address": address, "mode": "standalone-store"}
    kinds = {"in-tree": ("MooncakeStoreConnector", {}), "kvledger": ("MooncakeLedgerConnector", kvledger)}
    benches = {name: Bench(make_scheduler(model, *kind, requests), requests) for name, kind in kinds.items()}
    for bench in benches.values():
        for _ in range(10):
            bench.step()  # the prefill, and what the pin budget spread over the next steps
        bench.seconds.clear()
        bench.bytes.clear()
    for _ in range(steps):
        for bench in benches.values():
            bench.step()
    result = {
        name: {"ms": 1000 * statistics.median(b.seconds), "bytes": statistics.median(b.bytes)}
        for name, b in benches.items()
    }
    for bench in benches.values():
        bench.scheduler.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    init_none_hash(sha256)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        with running_embedded(Path(folder) / "store", 64 << 20) as store:
            settings = {"master_server_address": store.master_address, "metadata_server": "P2PHANDSHAKE"}
            (Path(folder) / "mooncake.json").write_text(json.dumps({**settings, "protocol": "tcp"}))
            os.environ["MOONCAKE_CONFIG_PATH"] = str(Path(folder) / "mooncake.json")
            for requests in arguments.requests:
                found = measure(model, store.master_address, requests, arguments.steps)
                rows.append({"requests": requests, **{f"{k} {m}": v for k, r in found.items() for m, v in r.items()}})
    print(
        f"{'requests':>8}  {'in-tree ms':>10}  {'kvledger ms':>11}  {'ratio':>6}  {'in-tree B':>10}  {'kvledger B':>10}"
    )
    for row in rows:
        ratio = row["in-tree ms"] / row["kvledger ms"]
        print(
            f"{row['requests']:>8}  {row['in-tree ms']:>10.3f}  {row['kvledger ms']:>11.3f}  {ratio:>5.1f}x  "
            f"{row['in-tree bytes']:>10.0f}  {row['kvledger bytes']:>10.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
