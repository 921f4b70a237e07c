"""One engine process of a recording: ``python -m conformance.recordings.workload ORDER.json``.

Traffic that is made to hurt: more requests than the KV pool has room for, aborts in every phase, cache resets, and the
same prompts again out of the store. Everything is drawn from a generator seeded with the scenario's name.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from conformance.recordings.scenarios import Scenario, by_name
from demo.plan import BLOCK_SIZE, Plan
from demo.progress import Progress

VOCABULARY = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}
MAX_MODEL_LEN = 512
IDLE_BOUND_S = 120.0


@dataclasses.dataclass(slots=True)
class Wanted:
    """A request to be sent: its id, prompt, length of the answer, and the phase in which it is to be aborted."""

    name: str
    prompt: list[int]
    new_tokens: int
    abort_while: str | None = None


def build(plan: Plan, store_address: str) -> Any:
    from vllm import LLM

    return LLM(
        model=plan.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=plan.dtype,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=plan.pool_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=256,
        tensor_parallel_size=plan.tensor_parallel,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config=plan.kv_transfer_config(store_address),
    )


class Traffic:
    """One scenario on one engine; counts what happened."""

    def __init__(self, scenario: Scenario, llm: Any, progress: Progress) -> None:
        self.scenario = scenario
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.progress = progress
        self.draw = random.Random(scenario.name)
        self.counts: Counter[str] = Counter()
        self.queue: deque[Wanted] = deque()
        self.live: dict[str, Wanted] = {}
        self.outputs: Counter[str] = Counter()  # tokens per live request
        self.resets = deque(scenario.resets)
        self.documents = [self._tokens(BLOCK_SIZE * self.draw.randint(3, 8)) for _ in range(scenario.documents)]

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(3, VOCABULARY) for _ in range(count)]

    def _wanted(self, name: str) -> Wanted:
        document = self.draw.choice(self.documents)
        prompt = document[: self.draw.randint(BLOCK_SIZE, len(document))] if self.draw.random() < 0.2 else document
        return Wanted(
            name, prompt + self._tokens(self.draw.randint(5, 90)), self.draw.randint(*self.scenario.new_tokens)
        )

    def run(self) -> dict[str, Any]:
        prompts = [self._wanted(f"r{i}") for i in range(self.scenario.requests)]
        for wave in range(self.scenario.waves):
            if wave:
                self.core.scheduler.reset_prefix_cache()  # vLLM's cache only: what was stored is to be loaded
            self.queue.extend(dataclasses.replace(w, abort_while=None) for w in prompts)
            for i, wanted in enumerate(self.queue):
                if self.scenario.aborted and i % self.scenario.abort_every == 0:
                    phases = self.scenario.aborted
                    wanted.abort_while = phases[(i // self.scenario.abort_every + wave) % len(phases)]
            self._serve()
            self._go_idle()
        return dict(self.counts)

    def _serve(self) -> None:
        while self.queue or self.live:
            self._send()
            self._step()
            self._abort()
            self._reset()

    def _send(self) -> None:
        """As many as may be outstanding; an id is used again only when vLLM has forgotten it."""
        from vllm import SamplingParams

        while self.queue and len(self.live) < self.scenario.outstanding:
            wanted = self.queue[0]
            if wanted.name in self.core.scheduler.requests:
                return
            self.queue.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=wanted.new_tokens, ignore_eos=True, detokenize=False)
            self.engine.add_request(wanted.name, {"prompt_token_ids": wanted.prompt}, params)
            self.live[wanted.name] = wanted

    def _step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            self.outputs[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                self.live.pop(output.request_id, None)
                self.outputs.pop(output.request_id, None)
                self.counts["finished"] += 1
                self.progress.send("finished", count=self.counts["finished"])
        if not outputs:
            time.sleep(0.001)  # nothing was computed: leave the core to the transfers

    def _abort(self) -> None:
        for wanted in list(self.live.values()):
            if wanted.abort_while is not None and wanted.abort_while == self._phase(wanted.name):
                self.engine.abort_request([wanted.name])
                del self.live[wanted.name]
                self.outputs.pop(wanted.name, None)
                self.counts[f"aborted_{wanted.abort_while}"] += 1
                self.queue.appendleft(self._wanted(wanted.name))  # the same id, another prompt

    def _phase(self, name: str) -> str | None:
        from vllm.v1.request import RequestStatus

        request = self.core.scheduler.requests.get(name)
        if request is None or (request.status is RequestStatus.RUNNING and self.outputs[name] < 5):
            return None
        names = {
            RequestStatus.WAITING: "waiting",
            RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
            RequestStatus.RUNNING: "running",
            RequestStatus.PREEMPTED: "preempted",
        }
        return names.get(request.status)

    def _reset(self) -> None:
        while self.resets and self.counts["finished"] >= self.resets[0][0] and self._is(self.resets[0][1]):
            self.resets.popleft()
            try:
                done = self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            except RuntimeError:  # vLLM gives up while loads or pins hold blocks; it has preempted everybody by then
                self.counts["resets_refused"] += 1
                done = self.engine.reset_prefix_cache(reset_connector=True)
            self.counts["resets_complete" if done else "resets_incomplete"] += 1

    def _is(self, moment: str) -> bool:
        """``loading``: some load is in flight; ``quiet``: requests run, no load is in flight and nothing is pinned."""
        phases = {self._phase(name) for name in self.core.scheduler.requests}
        if moment == "loading":
            return "loading" in phases
        pinned = self.core.scheduler.connector.snapshot()["blocks_pinned"]
        return "running" in phases and "loading" not in phases and not pinned

    def _go_idle(self) -> None:
        started = time.monotonic()
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            if time.monotonic() - started > IDLE_BOUND_S:
                raise TimeoutError(f"the engine is not idle after {IDLE_BOUND_S:g} s")
            self._step()


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    progress = Progress()
    progress.send("starting")
    started = time.monotonic()
    llm = build(Plan.from_json(order["plan"]), order["store_address"])
    startup_s = time.monotonic() - started
    progress.send("serving", startup_s=startup_s)
    traffic = Traffic(by_name(order["scenario"]), llm, progress)
    counts = traffic.run()
    snapshot = traffic.core.scheduler.connector.snapshot()
    depth = traffic.core.batch_queue_size
    llm.llm_engine.engine_core.shutdown()
    seconds = {"startup_s": startup_s, "served_s": time.monotonic() - started - startup_s}
    Path(order["result"]).write_text(json.dumps({"counts": counts, "snapshot": snapshot, "depth": depth, **seconds}))
    progress.send("done")


if __name__ == "__main__":
    main()
