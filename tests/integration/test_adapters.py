"""Adapters in vLLM's real scheduler with a real store: blocks are shared by what an adapter holds, not by its name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.engine import Engine, make_engine
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from kvledger.mooncake.embedded import EmbeddedStore
from tests.unit.identity.engines import make_adapter

PROMPT = list(range(100, 120))


@pytest.fixture
def engines(
    store: EmbeddedStore, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator:
    monkeypatch.setattr("kvledger.connector.get_tensor_model_parallel_rank", lambda: 0)
    made: list[Engine] = []

    def make() -> Engine:
        made.append(make_engine(tmp_path / "model", store, cache_prefix=request.node.name))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def serve(engine: Engine, request_id: str, adapter: Path) -> int:
    """Serve the prompt with the adapter; tokens that came from the store."""
    before = engine.connector.snapshot()["hit_tokens"]
    lora = LoRARequest("style", 1, str(adapter))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    request = Request(request_id, PROMPT, params, None, lora_request=lora, block_hasher=engine.hasher)
    engine.scheduler.add_request(request)
    engine.requests[request_id] = request
    engine.run_to_idle()
    return engine.connector.snapshot()["hit_tokens"] - before


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
