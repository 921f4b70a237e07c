"""An engine without a model: vLLM's real scheduler and both sides of a connector, in one process, with KV memory.

Nothing is computed; what the connector moves is real memory of the right shape. Its CPU time is told apart: hooks of
the scheduler, lookups, and the rank (its hooks, and every thread that is neither the main one nor for lookups).
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request

from bench.connectors import CONNECTORS, extra_config
from bench.harness import IN_TREE
from kvledger_conformance.engine import compat
from kvledger_conformance.suite import targets

IDLE_STEP_S = 0.001
"""vLLM's engine sleeps so long after a step in which nothing was computed."""
BOUND_S = 120.0


class NotDoneError(TimeoutError):
    """The engine was not idle in time."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of the connector's parts."""

    rank: float
    lookups: float

    def __sub__(self, before: "Cpu") -> "Cpu":
        return Cpu(self.rank - before.rank, self.lookups - before.lookups)


class BenchEngine:
    """Made by `running`."""

    def __init__(
        self, side: str, shape: compat.Shape, extra: Mapping[str, object], forward: Callable[[], None]
    ) -> None:
        connector = CONNECTORS[side]
        self.side = side
        self.shape = shape
        self.steps = 0
        self.longest_step_s = 0.0
        self._forward = forward
        self._hasher = compat.make_hasher(shape.block_size)
        self._hooks_s = 0.0
        self._match_s = 0.0
        self._number = 0
        self.external_tokens = 0
        self.finished: dict[str, float] = {}
        """When each request had its last token, by `time.perf_counter`."""
        own = extra_config(side, **extra)

        def config() -> Any:
            return compat.make_config(shape, connector.class_name, connector.module, own)

        connector_class = getattr(importlib.import_module(connector.module), connector.class_name)
        self.caches = {
            name: torch.rand(shape.num_blocks, shape.block_size, 2 * shape.cell_floats) for name in shape.layers
        }
        with compat.as_rank(0, 1), compat.cpu_worker():
            self.rank = connector_class(config(), KVConnectorRole.WORKER, compat.make_cache_config(shape))
            self.rank.register_kv_caches(self.caches)
            self.scheduler = compat.make_scheduler(shape, config())
        self._watch()

    @property
    def connector(self) -> Any:
        """The scheduler-side connector."""
        return self.scheduler.connector

    @property
    def ranks(self) -> list[Any]:
        """For the conformance suite, which knows how to end a connector's threads."""
        return [_Rank(self.rank)]

    def _watch(self) -> None:
        """Count the lookups' time on the scheduler's thread, and the tokens whose load core accepts."""
        match, accept = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc

        def get_num_new_matched_tokens(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return match(*args)
            finally:
                self._match_s += time.thread_time() - begin

        def update_state_after_alloc(request: Request, blocks: Any, num_external_tokens: int) -> None:
            self.external_tokens += num_external_tokens
            accept(request, blocks, num_external_tokens)

        self.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        self.connector.update_state_after_alloc = update_state_after_alloc

    def add(self, prompt: Sequence[int], max_tokens: int = 1) -> Request:
        """A request arrives."""
        self._number += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(str(self._number), list(prompt), params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """One turn of vLLM's engine loop."""
        begin = time.perf_counter()
        output = self.scheduler.schedule()
        computes = bool(output.num_scheduled_tokens)
        sampled = {r: [7] if compat.samples(self.scheduler.requests[r]) else [] for r in output.num_scheduled_tokens}
        begin_hooks = time.thread_time()
        with compat.as_rank(0, 1), compat.cpu_worker():
            told = compat.run_hooks(
                self.rank,
                output,
                output.kv_connector_metadata,
                self._forward if computes else lambda: None,
                lambda: None,
            )
        self._hooks_s += time.thread_time() - begin_hooks
        self.scheduler.update_from_output(output, compat.runner_output(sampled, told))
        self.steps += 1
        end = time.perf_counter()
        self.longest_step_s = max(self.longest_step_s, end - begin)
        for request_id in sampled:
            if request_id not in self.scheduler.requests:
                self.finished[request_id] = end
        if not computes and self.scheduler.has_requests():
            time.sleep(IDLE_STEP_S)

    def run(self, *, until: Callable[[], bool] | None = None, bound_s: float = BOUND_S) -> None:
        """Step until vLLM's loop would stop, or the condition holds.

        Raises:
            NotDoneError: that took too long.
        """
        deadline = time.perf_counter() + bound_s
        while self.scheduler.has_requests() and not (until is not None and until()):
            if time.perf_counter() > deadline:
                raise NotDoneError(f"{self.side}: still busy after {bound_s:g} s and {self.steps} steps")
            self.step()

    def has_unfinished(self) -> bool:
        """Whether a request still waits for a token."""
        return bool(self.scheduler.has_unfinished_requests())

    def forget(self) -> None:
        """Empty the local prefix cache, not the store's.

        Raises:
            RuntimeError: blocks are in use.
        """
        if not self.scheduler.kv_cache_manager.reset_prefix_cache():
            raise RuntimeError(f"{self.side}: vLLM does not reset its prefix cache: blocks are in use")

    def cpu(self) -> Cpu:
        """CPU time so far."""
        main = time.thread_time()
        lookups = sum(_cpu_of(thread) for thread in threading.enumerate() if _is_lookup(thread))
        rank = time.process_time() - main - lookups + self._hooks_s
        return Cpu(rank, lookups + self._match_s)

    def close(self) -> None:
        """In vLLM's order: ranks first, then the scheduler side."""
        self.rank.shutdown()
        self.connector.shutdown()
        if self.side == IN_TREE:
            targets.VLLM.close(self)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Rank:
    connector: Any


def _is_lookup(thread: threading.Thread) -> bool:
    """By name: kvledger's lookup thread; the in-tree connector's client thread and its server on rank 0."""
    return "lookup" in thread.name.lower() or "process_request" in thread.name


def _cpu_of(thread: threading.Thread) -> float:
    if thread.ident is None or not thread.is_alive():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@contextlib.contextmanager
def running(
    side: str,
    shape: compat.Shape,
    extra: Mapping[str, object] | None = None,
    *,
    forward: Callable[[], None] = lambda: None,
) -> Iterator[BenchEngine]:
    """An engine with one side's connector, on the store of the environment (`connectors.on_store`).

    `extra`: settings of the connector; `forward`: what a step that computes something does.
    """
    engine = BenchEngine(side, shape, extra or {}, forward)
    try:
        yield engine
    finally:
        engine.close()
