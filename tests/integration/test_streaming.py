"""Streaming input: a session's prompt grows chunk by chunk, and the blocks of every chunk are stored."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.live import LiveEngine

CHUNKS = [list(range(100, 112)), list(range(200, 212)), list(range(300, 312))]


def chunk(engine: LiveEngine, tokens: list[int], *, resumable: bool = True) -> Request:
    """One chunk of the session "s", as vLLM's front end sends it."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return Request("s", list(tokens), params, None, block_hasher=engine.hasher, resumable=resumable)


def send(engine: LiveEngine, tokens: list[int]) -> None:
    """The session gets a chunk, and everything that comes of it is over afterwards."""
    request = chunk(engine, tokens)
    session = engine.requests.setdefault("s", request)
    engine.weights_of[id(session)] = engine.weights
    engine.scheduler.add_request(request)
    engine.note_prefixes()
    engine.run(lambda: session.status is RequestStatus.WAITING_FOR_STREAMING_REQ)
    engine.run(lambda: not engine.connector.has_pending_push_work())


def end(engine: LiveEngine) -> None:
    engine.scheduler.add_request(chunk(engine, [], resumable=False))
    engine.run_to_idle()


def blocks(engine: LiveEngine, chunks: int) -> int:
    return sum(map(len, CHUNKS[:chunks])) // engine.shape.block_size


@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_blocks_of_every_chunk_are_stored(engines, save_decode_cache):
    engine = engines(save_decode_cache=save_decode_cache)
    stored = []
    for tokens in CHUNKS:
        send(engine, tokens)
        stored.append(len(engine.stored_keys()))
    assert stored == [blocks(engine, n) for n in (1, 2, 3)]
    end(engine)
    engine.assert_idle()
    assert engine.poisoned() == []


def test_another_engine_hits_what_a_session_stored(engines):
    engine = engines()
    for tokens in CHUNKS:
        send(engine, tokens)
    end(engine)
    other = engines()
    prompt = [token for tokens in CHUNKS for token in tokens]
    other.add("a", prompt)
    other.run_to_idle()
    assert other.connector.snapshot()["hit_tokens"] == len(prompt) - other.shape.block_size
    other.assert_right()
