"""What a connector adds to one decode step on the scheduler's thread, by number of running requests.

Both connectors in one run, interleaved, around vLLM's real scheduler; no model, no store (lookups off). Per step:
time in `build_connector_meta` (median) and bytes of pickled metadata sent to every rank. Figures depend on the
machine; the ratio is the point.

    ./dev bench step_cost [--requests 128 512 1024] [--steps 50] [--json FILE]
"""

import argparse
import json
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvledger.metadata import LedgerMetadata
from kvledger.mooncake.embedded import running_embedded
from kvledger.protocol import Report, Result
from kvledger_conformance.engine import compat
from kvledger_conformance.suite import targets

BLOCK = 32
PROMPT_TOKENS = 3 * BLOCK
CONNECTORS = {"in-tree": targets.VLLM, "kvledger": targets.KVLEDGER}


def make_scheduler(target: targets.Target, address: str, requests: int) -> Scheduler:
    """vLLM's scheduler with room for all the requests, around the target's scheduler side."""
    shape = compat.Shape(
        num_blocks=requests * 8 + 1,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_seqs=requests,
        max_num_batched_tokens=max(4096, requests * PROMPT_TOKENS),
    )
    extra = {**target.extra(address), "enable_lookup": False}
    return compat.make_scheduler(shape, compat.make_config(shape, target.class_name, target.module, extra))


class Bench:
    """One scheduler full of decoding requests."""

    def __init__(self, scheduler: Scheduler, requests: int) -> None:
        self.scheduler = scheduler
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        hasher = compat.make_hasher(BLOCK)
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


def measure(address: str, requests: int, steps: int) -> dict[str, float]:
    """One row: the medians of each connector."""
    benches = {n: Bench(make_scheduler(target, address, requests), requests) for n, target in CONNECTORS.items()}
    for bench in benches.values():
        for _ in range(10):
            bench.step()  # the prefill, and what the pin budget spread over the next steps
        bench.seconds.clear()
        bench.bytes.clear()
    for _ in range(steps):
        for bench in benches.values():
            bench.step()
    row: dict[str, float] = {"requests": requests}
    for name, bench in benches.items():
        row[f"{name} ms"] = 1000 * statistics.median(bench.seconds)
        row[f"{name} bytes"] = statistics.median(bench.bytes)
        bench.scheduler.shutdown()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_embedded(folder, 64 << 20) as store,
        targets.VLLM.around(time.monotonic, store.master_address),
    ):
        rows = [measure(store.master_address, requests, arguments.steps) for requests in arguments.requests]
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
