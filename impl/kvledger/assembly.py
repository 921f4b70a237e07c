"""From vLLM's configuration to the two sides: what is decided once, at start.

`Parts` is the one seam: what kvledger takes from the outside world. Tests, demo and the conformance suite give others.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvledger.config import Settings
from kvledger.errors import ConfigError
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace
from kvledger.mooncake.client import MooncakeClient, StoreClient
from kvledger.mooncake.selftest import self_test
from kvledger.observe.trace import TraceRecorder
from kvledger.protocol import Breaker, Ledger, PinTable
from kvledger.scheduler.lookup import LookupService
from kvledger.scheduler.side import SchedulerSide
from kvledger.shutdown import shutdown_budget_s
from kvledger.worker.fence import Fence, record_fence
from kvledger.worker.rank_side import RankSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

logger = logging.getLogger(__name__)

BREAKER_OPEN_MAX_S = 60.0


class ConnectStore(Protocol):
    """Joins the store that `settings` name. `name` is "lookup" or "rank" and its number."""

    def __call__(self, settings: Settings, *, segment_bytes: int, buffer_bytes: int, name: str) -> StoreClient:
        """See `MooncakeClient.connect`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What kvledger is made of besides its own code."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, monotonic: every bound and backoff of the two sides is measured by it."""
    connect_store: ConnectStore = MooncakeClient.connect
    record_fence: Callable[[torch.device], Fence] = record_fence
    scheduler_side: type[SchedulerSide] = SchedulerSide


def pin_budget(settings: Settings, plan: GroupPlan) -> int:
    """Most blocks that may be pinned at once.

    A fraction of the pool, but always such that one request of full length (and the null block) still fits beside the
    pins, however long a store hangs; at least 1 in a pool that is too small for both.
    """
    if settings.max_pinned_blocks is not None:
        return min(settings.max_pinned_blocks, plan.num_blocks)
    spare = plan.num_blocks - 1 - plan.max_blocks_per_request
    return max(1, min(int(plan.num_blocks * settings.max_pinned_fraction), spare))


def make_ledger(settings: Settings, plan: GroupPlan, *, pins: PinTable | None = None) -> Ledger:
    """The scheduler side's ledger, with the pin table that the settings ask for unless there is one."""
    return Ledger(
        num_ranks=plan.num_ranks,
        pins=PinTable(pin_budget(settings, plan)) if pins is None else pins,
        max_store_attempts=settings.max_store_attempts,
        stall_timeout_s=settings.stall_timeout_s,
        retry_backoff_s=settings.retry_backoff_s,
    )


def make_breaker(settings: Settings) -> Breaker:
    """A breaker for one user of the store."""
    return Breaker(threshold=settings.breaker_failures, initial_s=settings.breaker_open_s, max_s=BREAKER_OPEN_MAX_S)


def may_load(*, consumer: bool, steps_in_flight: int) -> bool:
    """A producer with steps in flight must not load: core does not defer block frees for it (contract G10)."""
    return consumer or steps_in_flight == 1


def check_pipeline(settings: Settings, steps_in_flight: int) -> None:
    """With two steps in flight core has scheduled the next one before it hears that a synchronous load failed; it
    delivers tokens computed on what did not arrive (vLLM 0.32, K3 in docs/found.md).

    Raises:
        ConfigError: synchronous loads with steps in flight.
    """
    if not settings.load_async and steps_in_flight > 1:
        raise ConfigError(
            field="load_async",
            value=False,
            remedy="does not work with asynchronous scheduling or pipeline parallelism: core would use what a failed "
            "load did not bring; set load_async to true, or start vLLM with --no-async-scheduling",
        )


def recompute_failed_loads(config: "KVTransferConfig", core: "KVTransferConfig | None" = None) -> None:
    """A lost key must cost a recomputation, never a request. Core reads the policy after the connector is built.

    `core` is the configuration that core reads, if that is not this connector's `config`: MultiConnector gives each
    child a copy, from which the outer one cannot be reached where core runs.

    Raises:
        ConfigError: `core` lets a failed load end the request.
    """
    if core is not None and core is not config and core.kv_load_failure_policy != "recompute":
        raise ConfigError(
            field="kv_load_failure_policy",
            value=core.kv_load_failure_policy,
            source=f"the configuration of {core.kv_connector}",
            remedy="as a child of another connector kvledger cannot change it, and a lost object would end its request; "
            f'add "kv_load_failure_policy": "recompute" beside "kv_connector": "{core.kv_connector}" in '
            "--kv-transfer-config",
        )
    if config.kv_load_failure_policy != "recompute":
        logger.info("kvledger: kv_load_failure_policy set to 'recompute' (was %r)", config.kv_load_failure_policy)
        config.kv_load_failure_policy = "recompute"


def make_lookups(parts: Parts, settings: Settings, plan: GroupPlan, keys: KeySpace) -> LookupService:
    """The lookup thread with a store client of its own."""
    return LookupService(
        client=parts.connect_store(settings, segment_bytes=0, buffer_bytes=0, name="lookup"),
        keys=keys,
        shards=plan.num_ranks,
        chunk_blocks=settings.lookup_chunk_blocks,
        timeout_s=settings.lookup_timeout_s,
        breaker=make_breaker(settings),
        clock=parts.clock,
    )


def make_scheduler_side(
    parts: Parts,
    settings: Settings,
    plan: GroupPlan,
    keys: KeySpace,
    *,
    config: "KVTransferConfig",
    steps_in_flight: int,
) -> SchedulerSide:
    """The scheduler side.

    Raises:
        ConfigError: see `check_pipeline`.
        StoreError: the lookup client cannot join the store.
    """
    recompute_failed_loads(config)
    loads = settings.enable_lookup and may_load(consumer=config.is_kv_consumer, steps_in_flight=steps_in_flight)
    if loads:
        check_pipeline(settings, steps_in_flight)
    elif settings.enable_lookup:
        logger.warning("kvledger: kv_role kv_producer does not load with asynchronous scheduling; use kv_both")
    return parts.scheduler_side(
        settings=settings,
        plan=plan,
        keys=keys,
        ledger=make_ledger(settings, plan),
        lookups=make_lookups(parts, settings, plan, keys) if loads else None,
        may_save=config.kv_role in ("kv_producer", "kv_both"),
        recorder=make_recorder(settings, plan),
        clock=parts.clock,
    )


def make_recorder(settings: Settings, plan: GroupPlan) -> TraceRecorder | None:
    """The recorder that `trace_dir` asks for, if any."""
    if settings.trace_dir is None:
        return None
    return TraceRecorder(
        settings.trace_dir,
        ranks=plan.num_ranks,
        blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_pinned=pin_budget(settings, plan),
        max_attempts=settings.max_store_attempts,
    )


def make_rank_side(parts: Parts, settings: Settings, keys: KeySpace, rank: int) -> RankSide:
    """One rank's side. Rank 0 tests the store for its engine.

    Raises:
        StoreError: its client cannot join the store, or the store does not keep what it is given (`self_test`).
    """
    client = parts.connect_store(
        settings, segment_bytes=settings.rank_segment_bytes, buffer_bytes=0, name=f"rank{rank}"
    )
    try:
        if rank == 0:
            self_test(client, keys)
        return RankSide(
            settings=settings, rank=rank, keys=keys, client=client, clock=parts.clock, record_fence=parts.record_fence
        )
    except BaseException:
        client.close(shutdown_budget_s(settings.shutdown_timeout_s))
        raise
