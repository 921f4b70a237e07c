"""The suite's engine around kvledger on a real store, whose clients fail as told, and what must hold when it is idle."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.request import Request, RequestStatus

from demo.faults import FaultyStore
from kvledger.assembly import Parts
from kvledger.config import Settings
from kvledger.connector import MooncakeLedgerConnector
from kvledger.keys import KeySpace, parse_key
from kvledger.mooncake.client import MooncakeClient, StoreClient
from kvledger.mooncake.embedded import EmbeddedStore, list_keys
from kvledger_conformance.engine import oracle
from kvledger_conformance.engine.compat import Shape
from kvledger_conformance.engine.engine import Engine
from kvledger_conformance.suite.targets import Target, running


def connect_faulty_store(settings: Settings, *, segment_bytes: int, buffer_bytes: int, name: str) -> StoreClient:
    """`Parts.connect_store`: a client that fails as told."""
    inner = MooncakeClient.connect(settings, segment_bytes=segment_bytes, buffer_bytes=buffer_bytes, name=name)
    FaultyConnector.clients[name] = client = FaultyStore(inner)
    return client


class FaultyConnector(MooncakeLedgerConnector):
    """kvledger with every store client wrapped for faults."""

    clients: ClassVar[dict[str, FaultyStore]]
    """By name ("lookup", "rank0", ...), of the engine that is being built."""
    parts = Parts(connect_store=connect_faulty_store)


class LiveEngine(Engine):
    """An engine that runs in real time. Made by `live_engine`."""

    store: EmbeddedStore
    clients: dict[str, FaultyStore]
    cache_prefix: str
    slowest_step_s = 0.0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, stop: int = 0) -> Request:
        return super().add(request_id, list(prompt), max_tokens, stop)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run(self, until: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Step until the condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not until():
            begin = time.monotonic()
            if begin > deadline:
                raise TimeoutError(f"after {self.steps} steps: {self.connector.snapshot()}")
            output = self.step()
            self.slowest_step_s = max(self.slowest_step_s, time.monotonic() - begin)
            if not output.num_scheduled_tokens:
                time.sleep(0.001)  # what EngineCore does after a step that executed nothing

    def run_to_idle(self, *, timeout_s: float = 30.0) -> None:
        """Step until vLLM itself would stop stepping."""
        self.run(lambda: not self.busy, timeout_s=timeout_s)

    # -- what must hold ----------------------------------------------------

    def assert_right(self) -> None:
        """Once idle: every finished request has the right tokens, nothing is held, the store holds no wrong byte."""
        self.run_to_idle()
        self.assert_outputs()
        self.assert_idle()
        assert self.poisoned() == []

    def assert_outputs(self) -> None:
        """Every request that was not aborted has the tokens its prompt must lead to."""
        for request_id, request in self.all_requests():
            if request.status is not RequestStatus.FINISHED_ABORTED:
                right = oracle.right_output(request.prompt_token_ids, request.max_tokens, self.weights)
                assert list(request.output_token_ids) == right, request_id

    def assert_idle(self) -> None:
        """Block references are back to none, and no per-request entry is left on either side."""
        assert [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null] == []
        snapshot = self.connector.snapshot()
        assert (snapshot["blocks_pinned"], snapshot["open_jobs"], snapshot["generations"]) == (0, 0, 0)
        view = self.connector.scheduler_side.view()
        assert (view.asked, view.admitted, view.ledger.nohit) == (frozenset(), 0, frozenset())
        assert all(rank.connector.rank_side.wait_idle(0.0) for rank in self.ranks)

    def stored_keys(self) -> list[str]:
        """Keys of this engine's key space in the store, of every epoch of it."""
        space = KeySpace(namespace=self.connector.snapshot()["namespace"], cache_prefix=self.cache_prefix)
        start = space.prefix().removesuffix("@")
        return [k for k in list_keys(self.store.metrics_port) if k.startswith(start)]

    def poisoned(self) -> list[str]:
        """Keys whose stored bytes are not what their block hash stands for."""
        reader = self.clients["rank0"]._inner  # faults are for the engine
        buffer = torch.zeros((len(oracle.LAYERS), self.shape.block_size), dtype=torch.int64)
        reader.register(buffer.data_ptr(), buffer.nbytes)
        wrong = []
        for key in self.stored_keys():
            parsed = parse_key(key)
            tokens = self.names.get(parsed.block_hash)
            read = reader.get([key], [[buffer.data_ptr()]], [[buffer.nbytes]])
            if (
                read != [buffer.nbytes]
                or tokens is None
                or [*map(tuple, buffer.tolist())]
                != oracle.block_images(tokens, self.shape.block_size, parsed.shard, self.weights)
            ):
                wrong.append(key)
        reader.unregister(buffer.data_ptr())
        return wrong


@contextlib.contextmanager
def live_engine(
    store: EmbeddedStore,
    *,
    ranks: int = 1,
    num_blocks: int = 33,
    max_num_seqs: int = 8,
    role: str = "kv_both",
    cache_prefix: str = "",
    **settings: Any,
) -> Iterator[LiveEngine]:
    """An engine on the store, closed at the end. vLLM's own policy is to end requests whose load failed."""
    shape = Shape(
        ranks=ranks,
        num_blocks=num_blocks,
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        role=role,
        load_failures="fail",
    )

    extra = {
        "master_server_address": store.master_address,
        "mode": "standalone-store",
        "staging_bytes": "1MiB",
        "max_batch_bytes": "64KiB",
        "shutdown_timeout_s": 5.0,
        "lookup_wait_s": 0.5,
        "cache_prefix": cache_prefix,
        **settings,
    }
    clients: dict[str, FaultyStore] = {}
    FaultyConnector.clients = clients
    target = Target("kvledger", __name__, FaultyConnector.__name__, lambda _: extra)
    with running(target, shape, store.master_address, kind=LiveEngine) as engine:
        assert isinstance(engine, LiveEngine)
        engine.store, engine.clients, engine.cache_prefix = store, clients, cache_prefix
        yield engine
