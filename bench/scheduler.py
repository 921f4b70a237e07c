"""vLLM's real scheduler around a connector's scheduler side, without a model: what the connector costs it, per step.

Every hook that core calls is timed in CPU time of the scheduler's thread. A fast rank is played: every store job is
done when the next step ends, unless its report is withheld. Lookups are off; `lookup.py` has them.
"""

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeStoreConnectorMetadata,
    MooncakeStoreWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from bench.connectors import CONNECTORS, close_scheduler_side, extra_config
from kvledger.metadata import LedgerMetadata, LedgerWorkerMetadata
from kvledger.protocol import Kind, Report, Result
from kvledger_conformance.engine import compat

os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the tiny model's own limit is not measured here

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the connector cost in one step."""

    build_s: float
    """CPU seconds in `build_connector_meta`."""
    total_s: float
    """CPU seconds in all hooks."""
    metadata_bytes: int
    """Pickled, as it goes to every rank."""


class BenchScheduler:
    """A scheduler with one side's connector and what its steps cost."""

    def __init__(self, side: str, shape: compat.Shape) -> None:
        connector = CONNECTORS[side]
        extra = extra_config(side, enable_lookup=False)
        self.scheduler = compat.make_scheduler(
            shape, compat.make_config(shape, connector.class_name, connector.module, extra)
        )
        self.costs: list[StepCost] = []
        self._hasher = compat.make_hasher(shape.block_size)
        self._reports: KVConnectorWorkerMetadata | None = None
        self._spent: Counter[str] = Counter()
        for hook in HOOKS:
            if hasattr(self.scheduler.connector, hook):
                setattr(self.scheduler.connector, hook, self._timed(hook, getattr(self.scheduler.connector, hook)))

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[hook] += time.thread_time() - begin  # type: ignore[assignment]

        return timed

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """A request arrives."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(request_id, list(prompt), params, None, block_hasher=self._hasher))

    def step(self, *, report: bool = True) -> StepCost:
        """One step. `report`: whether the jobs it issues are reported in the next."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        sent = len(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
        sampled = {r: [7] if compat.samples(self.scheduler.requests[r]) else [] for r in output.num_scheduled_tokens}
        told = KVConnectorOutput(kv_connector_worker_meta=self._reports)
        self._reports = reports_of(metadata) if report else None
        self.scheduler.update_from_output(output, compat.runner_output(sampled, told))
        cost = StepCost(self._spent["build_connector_meta"], sum(self._spent.values()), sent)
        self._spent.clear()
        self.costs.append(cost)
        return cost

    def close(self) -> None:
        """End it."""
        close_scheduler_side(self.scheduler.connector)


def reports_of(metadata: Any) -> KVConnectorWorkerMetadata | None:
    """What the only rank of an engine says when it has done every store job of a step."""
    if isinstance(metadata, LedgerMetadata):
        stores = [job for job in metadata.plan.jobs if job.kind is Kind.STORE]
        reports = [Report(job_id=job.job_id, rank=0, result=Result.DONE) for job in stores]
        return LedgerWorkerMetadata(reports) if reports else None
    if isinstance(metadata, MooncakeStoreConnectorMetadata):
        ids = [request.store_job_id for request in metadata.requests if request.store_job_id is not None]
        return MooncakeStoreWorkerMetadata(dict.fromkeys(ids, 1)) if ids else None
    raise TypeError(f"metadata of an unknown connector: {type(metadata).__name__}")


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt that shares no block with another number's."""
    return [3 + number % 500, 3 + number // 500 % 500, *(3 + (number * 7 + k) % 500 for k in range(2, tokens))]
