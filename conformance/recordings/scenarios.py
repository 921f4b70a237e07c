"""The set of recordings that ``./dev trace run DIR --all`` makes: real engines under every kind of trouble.

Only the protocol's events matter here, so the model is tiny and its weights are random; engine, store and connector
are the real ones. Each scenario says what its recording must contain: one in which nothing happened proves nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Facts = dict[str, Any]

FAULTS_OF = "STORE_FAULTS"  # environment variable: whose faults the ranks' clients have
MANY_CALLS = 2000  # faults are scripted by call number, so "every third" needs an end


@dataclasses.dataclass(frozen=True, slots=True)
class StoreFault:
    """A fault of the ranks' store client: calls ``first``, ``first + every``, … of ``operation`` fail."""

    operation: Literal["put", "get"]
    first: int
    every: int
    code: int | None = None  # None: the call raises instead of answering
    positions: tuple[int, ...] = ()  # objects of the call that fail; empty: all
    rank: int | None = None  # None: on every rank


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One recording: one engine process. Prompts share ``documents`` prefixes; each wave serves all of them again,
    after vLLM's own prefix cache has been emptied."""

    name: str
    about: str
    must: tuple[str, ...]
    tensor_parallel: int = 1
    pool_blocks: int = 40
    requests: int = 24
    documents: int = 5
    outstanding: int = 10
    new_tokens: tuple[int, int] = (16, 80)
    waves: int = 1
    aborted: tuple[str, ...] = ()  # phases in which requests are aborted, one request after the other
    abort_every: int = 3
    resets: tuple[
        tuple[int, str], ...
    ] = ()  # after so many finished requests, in a moment that is "loading" or "quiet"
    kill_after: int | None = None
    segment_mib: int = 256
    layers: int = 2  # of the model: how large a block is
    store_delay_ms: int = 0
    load_sync: bool = False
    transfer_mode: str | None = None
    extra: Facts = dataclasses.field(default_factory=dict)
    faults: tuple[StoreFault, ...] = ()
    connector: str | None = None  # module:class of another connector than kvledger's own
    rejected_by: str | None = None  # negative controls: the rule that the recording must break


EVERY_PHASE = ("running", "waiting", "loading", "preempted")
OBJECT_NOT_FOUND, NO_SPACE, TRANSFER_FAIL, RPC_FAIL = -704, -200, -800, -900
SOON: Facts = {"retry_backoff_s": 0.01, "breaker_failures": 10_000, "quarantine_s": 0.2}  # a recording takes seconds

SCENARIOS = (
    Scenario(
        name="storm",
        about="a pool far too small: preemptions all the time, then everything again from the store",
        must=("preempted", "loads_done"),
        pool_blocks=26,
        waves=2,
    ),
    Scenario(
        name="storm-tp2",
        about="the same on two ranks, with a store that takes 20 ms for each call",
        must=("preempted", "loads_done", "two_ranks", "late_stores"),
        store_delay_ms=20,
        tensor_parallel=2,
        pool_blocks=26,
        waves=2,
    ),
    Scenario(
        name="aborts",
        about="every third request aborted while it runs, waits, loads or is preempted; its id is used again",
        must=("preempted", "aborted_running", "aborted_loading", "ids_reused"),
        aborted=EVERY_PHASE,
        waves=2,
        pool_blocks=30,
        store_delay_ms=10,
    ),
    Scenario(
        name="aborts-tp2",
        about="aborts on two ranks, with a store that takes 15 ms for each call",
        must=("aborted_running", "aborted_loading", "ids_reused", "two_ranks"),
        tensor_parallel=2,
        aborted=EVERY_PHASE,
        waves=2,
        pool_blocks=30,
        store_delay_ms=15,
    ),
    Scenario(
        name="slow-store",
        about="100 ms for each call to the store: pins pile up, vLLM waits for them or preempts",
        must=("preempted", "loads_done"),
        store_delay_ms=100,
        waves=2,
        pool_blocks=30,
    ),
    Scenario(
        name="direct",
        about="direct transfers out of and into KV blocks, 20 ms late",
        must=("preempted", "loads_done"),
        transfer_mode="direct",
        store_delay_ms=20,
        waves=2,
        pool_blocks=30,
    ),
    Scenario(
        name="store-full",
        about="a store of 16 MiB: puts are refused, objects are evicted",
        must=("preempted", "refused"),
        segment_mib=16,
        layers=40,
        waves=2,
        documents=24,
        extra=SOON,
    ),
    Scenario(
        name="failed-puts",
        about="every third put fails: for good, for part of its objects, or without an answer",
        must=("preempted", "failed_stores", "indeterminate_stores", "retried", "given_up"),
        extra=SOON,
        waves=2,
        faults=(
            StoreFault("put", first=2, every=3, code=RPC_FAIL),
            StoreFault("put", first=3, every=6, code=TRANSFER_FAIL, positions=(0,)),
            StoreFault("put", first=5, every=7),
        ),
    ),
    Scenario(
        name="failed-loads",
        about="every second get fails, wholly or in part: what arrived is used, the rest is computed",
        must=("preempted", "loads_failed", "loads_done"),
        waves=3,
        extra=SOON,
        faults=(
            StoreFault("get", first=1, every=4, code=OBJECT_NOT_FOUND),
            StoreFault("get", first=3, every=4, code=TRANSFER_FAIL, positions=(0,)),
        ),
    ),
    Scenario(
        name="sync-loads",
        about="loads inside the step, shared by requests of the same step, under preemption",
        must=("preempted", "sync_loads_done"),
        load_sync=True,
        waves=3,
        documents=3,
        pool_blocks=30,
    ),
    Scenario(
        name="sync-load-failures",
        about="every second synchronous load fails: those who rest on it are tainted, its blocks leave the cache",
        must=("sync_loads_done", "sync_loads_failed", "tainted", "sharers_tainted", "evicted"),
        load_sync=True,
        requests=14,
        new_tokens=(4, 40),
        waves=4,
        documents=3,
        aborted=("running",),
        extra=SOON,
        faults=(
            StoreFault("get", first=1, every=4, code=OBJECT_NOT_FOUND),
            StoreFault("get", first=3, every=4, code=TRANSFER_FAIL, positions=(0,)),
        ),
    ),
    Scenario(
        name="sync-load-failures-tp2",
        about="synchronous loads that fail on one of two ranks",
        must=("sync_loads_done", "sync_loads_failed", "tainted", "evicted", "two_ranks"),
        tensor_parallel=2,
        load_sync=True,
        waves=2,
        documents=3,
        faults=(StoreFault("get", first=2, every=3, code=OBJECT_NOT_FOUND, rank=1),),
    ),
    Scenario(
        name="resets",
        about="weights change in the middle: prefix cache and connector are reset, with requests running, with loads in flight",
        must=("reset_while_loading", "resets_complete", "resets_refused", "preempted", "loads_done"),
        resets=((6, "quiet"), (18, "loading"), (18, "loading"), (26, "quiet"), (35, "loading")),
        requests=16,
        waves=3,
        store_delay_ms=10,
    ),
    Scenario(
        name="killed-master",
        about="the Mooncake master is killed in the middle: jobs fail, requests do not",
        must=("preempted", "failed_stores"),
        requests=40,
        pool_blocks=30,
        kill_after=14,
    ),
    Scenario(
        name="early-release",
        about="negative control: a connector that gives its pins back at once, and does not know it, must be rejected",
        must=("preempted",),
        connector="tests.twins.early_release:EarlyReleaseConnector",
        rejected_by="PinnedNotFreed",
        store_delay_ms=150,
        pool_blocks=26,
    ),
)


def by_name(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)
