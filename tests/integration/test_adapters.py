"""Adapters in vLLM's real scheduler with a real store: blocks are shared by what an adapter holds, not by its name."""

from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from tests.support.live import LiveEngine
from tests.unit.identity.engines import make_adapter

PROMPT = list(range(100, 120))


def serve(engine: LiveEngine, request_id: str, adapter: Path) -> int:
    """Serve the prompt with the adapter; tokens that came from the store."""
    before = engine.connector.snapshot()["hit_tokens"]
    params: Any = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    lora = LoRARequest("style", 1, str(adapter))
    request = Request(request_id, PROMPT, params, None, lora_request=lora, block_hasher=engine.hasher)
    engine.requests[request_id] = request
    engine.weights_of[id(request)] = engine.weights
    engine.note_prefixes()
    engine.scheduler.add_request(request)
    engine.run_to_idle()
    return int(engine.connector.snapshot()["hit_tokens"] - before)


def test_an_adapter_is_shared_by_content(engines, tmp_path):
    adapter = make_adapter(tmp_path / "a")
    assert serve(engines(), "cold", adapter) == 0
    assert serve(engines(), "warm", adapter) == 16
    make_adapter(adapter, scale=1.5)
    assert serve(engines(), "other bytes under the name", adapter) == 0
    make_adapter(adapter)
    assert serve(engines(), "the first again", adapter) == 16


def test_nothing_is_shared_after_a_change_under_a_running_engine(engines, tmp_path):
    adapter = make_adapter(tmp_path / "a")
    engine = engines()
    serve(engine, "first", adapter)
    stored = len(engine.stored_keys())
    assert stored == 5
    make_adapter(adapter, scale=1.5)
    engine.pool.evict_blocks(set(range(engine.pool.num_gpu_blocks)))
    assert serve(engine, "second", adapter) == 0
    assert len(engine.stored_keys()) == stored
    snapshot = engine.connector.snapshot()
    assert (snapshot["blocks_pinned"], snapshot["open_jobs"], snapshot["generations"]) == (0, 0, 0)
