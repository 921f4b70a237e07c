"""One engine process of the demo: ``python -m demo.engine ORDER.json RESULT.json``.

The engine core runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that the scheduler's block pool and the
connector's ``snapshot()`` can be read; with ``--tp N`` the ranks are processes of their own.
"""

import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Self

from demo.plan import BLOCK_SIZE, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, REFERENCE_BLOCKS, Plan
from demo.progress import Progress

IDLE_BOUND_S = 120.0  # how long the engine may take to go idle after the last output


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What this process shall do.

    ``prefill`` (reference only): token sequences whose KV is wanted, instead of serving the prompts.
    ``dump_dir`` (reference only): the folder that the KV of every cached block goes to, for the audit."""

    role: str
    plan: Plan
    store_address: str | None = None
    dump_dir: str | None = None
    prefill: list[list[int]] = dataclasses.field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Self:
        values = json.loads(path.read_text())
        return cls(**values | {"plan": Plan(**values["plan"])})


def build(order: Order) -> Any:
    """The engine. Importing vLLM makes a million objects that stay; to go through them for garbage again and again would
    take a quarter of the time."""
    gc.disable()
    from vllm import LLM

    gc.freeze()
    gc.enable()

    plan = order.plan
    own: dict[str, Any] = {"worker_extension_cls": "demo.kv_reader.KVReader"}
    if order.store_address is not None:
        own = {"kv_transfer_config": plan.kv_transfer_config(order.store_address)}
    return LLM(
        model=plan.model,
        dtype=plan.dtype,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=REFERENCE_BLOCKS if order.role == "reference" else plan.pool_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        tensor_parallel_size=plan.tensor_parallel,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        **own,
    )


class Run:
    """One engine and what is measured on it."""

    def __init__(self, order: Order, llm: Any, progress: Progress) -> None:
        self.order = order
        self.llm = llm
        self.progress = progress
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.longest_step_s = 0.0

    def serve(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """All prompts at once, greedy, every output of full length; returns vLLM's outputs in order."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        finished: dict[int, Any] = {}
        while self.engine.has_unfinished_requests():
            for output in self.step():
                if output.finished:
                    finished[int(output.request_id)] = output
                    self.progress.send("finished", count=len(finished), total=len(prompts))
        return [finished[number] for number in range(len(prompts))]

    def step(self) -> list[Any]:
        started = time.monotonic()
        outputs: list[Any] = self.engine.step()
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - started)
        return outputs

    def go_idle(self) -> tuple[bool, float]:
        """Steps the engine until it has nothing left to do, as the engine's own loop would."""
        started = time.monotonic()
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            if time.monotonic() - started > IDLE_BOUND_S:
                return False, time.monotonic() - started
            self.step()
            time.sleep(0.001)  # nothing is computed in these steps: leave the core to the transfers
        return True, time.monotonic() - started

    def counters(self) -> dict[str, int]:
        """vLLM's own counters (not the connector's)."""
        wanted = {
            "vllm:num_preemptions": "preemptions",
            "vllm:external_prefix_cache_hits": "hit_tokens",
            "vllm:prefix_cache_hits": "local_hit_tokens",
        }
        values = dict.fromkeys(wanted.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in wanted:
                values[wanted[metric.name]] += int(metric.value)
        return values

    def dump(self, folder: str) -> dict[str, Any]:
        """Writes the KV of every block that has a hash; returns the index of the records."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        pool = self.core.scheduler.kv_cache_manager.block_pool
        slots: dict[str, int] = {}
        block_ids: list[int] = []
        for block in pool.blocks:
            if block.block_hash is not None and (key := get_block_hash(block.block_hash).hex()) not in slots:
                slots[key] = len(block_ids)
                block_ids.append(block.block_id)
        sizes = self.llm.collective_rpc("dump_blocks", args=(block_ids, folder))
        return {"slots": slots, "record_bytes": sizes, "dtype": self.order.plan.dtype}


def run(order: Order, progress: Progress) -> dict[str, Any]:
    from demo.prompts import token_prompts

    started = time.monotonic()
    llm = build(order)
    progress.send("serving", startup_s=time.monotonic() - started)
    job = Run(order, llm, progress)
    result: dict[str, Any] = {}
    if order.prefill:
        job.serve(order.prefill, 1)
        job.go_idle()
    else:
        prompts = token_prompts(llm.get_tokenizer(), order.plan.num_prompts)
        outputs = job.serve(prompts, order.plan.max_new_tokens)
        result = {
            "prompts": prompts,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "finish_reasons": [output.outputs[0].finish_reason for output in outputs],
            "ttft_s": statistics.median(output.metrics.first_token_latency for output in outputs),
        }
        result["idle"], result["idle_after_s"] = job.go_idle()
        result |= job.counters()
        connector = job.core.scheduler.connector
        result["snapshot"] = dict(connector.snapshot()) if connector is not None else {}
        result["longest_step_s"] = job.longest_step_s
    if order.dump_dir:
        result["dump"] = job.dump(order.dump_dir)
    job.engine.engine_core.shutdown()
    return result


def main() -> None:
    order = Order.load(Path(sys.argv[1]))
    try:
        Path(sys.argv[2]).write_text(json.dumps(run(order, Progress())))
    finally:
        gc.unfreeze()  # else Triton's objects count as leaked: a page of them at the end of the log, after any traceback
    sys.stdout.flush()
    os._exit(0)  # all is written and shut down, and nobody needs its garbage to be found, which takes seconds


if __name__ == "__main__":
    main()
