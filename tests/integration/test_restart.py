"""A load of which nothing arrives: vLLM frees its blocks and admits the request anew, from zero. A new generation."""

from collections.abc import Iterator

import pytest
from vllm.v1.request import RequestStatus

from demo.faults import Fault, Gate
from tests.support.live import LiveEngine

PROMPT = list(range(100, 120))


@pytest.fixture
def loading(engines) -> Iterator[tuple[LiveEngine, Gate]]:
    """An engine whose request "a" waits for a load that is held, and will fail for every block."""
    cold = engines()
    cold.add("a", PROMPT)
    cold.run_to_idle()
    engine = engines()
    held = Gate()
    engine.clients["rank0"].add(Fault(operation="get", gate=held, code=-704))
    engine.add("a", PROMPT)
    engine.run(lambda: engine.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    yield engine, held
    held.open()


def generation(engine: LiveEngine) -> int:
    return int(engine.connector.scheduler_side.view().ledger.trk["a"].gen)


def test_the_request_is_a_new_generation(loading):
    engine, held = loading
    first = generation(engine)
    held.open()
    engine.run(lambda: engine.requests["a"].status is RequestStatus.RUNNING)
    assert generation(engine) == first + 1
    engine.run_to_idle()
    engine.assert_right()


def test_after_a_refused_reset_it_stores_again_once_one_succeeds(loading):
    """A load in flight makes core refuse; none of it arrives, and what is computed anew may rest on blocks of before."""
    engine, held = loading
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    before = set(engine.stored_keys())
    held.open()
    engine.run_to_idle()
    engine.assert_right()
    assert set(engine.stored_keys()) == before
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("b", PROMPT)
    engine.run_to_idle()
    assert len(set(engine.stored_keys()) - before) == len(PROMPT) // engine.shape.block_size
