"""The scheduler side behind vLLM's hooks: translates vLLM's objects for the ledger and its decisions back. One thread.

Hook → action: `get_num_new_matched_tokens` → lookup; `update_state_after_alloc` → `BeginGeneration`;
`build_connector_meta` → `EndGeneration` of preempted requests, `EmitLoad`, `EmitStore`; `update_connector_output` →
`ApplyReport`; `request_finished` → `EndGeneration`; `reset_cache` → `Reset`.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvledger.config import Settings
from kvledger.errors import ProtocolError
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace
from kvledger.observe.trace import TraceRecorder, short
from kvledger.protocol import Job, Kind, Ledger, Report, Settled
from kvledger.scheduler.admissions import Admissions
from kvledger.scheduler.lookup import Lookup, LookupService
from kvledger.worker.rank_side import StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

ANSWER_VALID_S = 5.0
"""How long a lookup's answer may wait for admission; the store's key lease (10 s by default) is longer."""


@dataclass(slots=True)
class Asked:
    """A lookup of one request, valid for exactly these circumstances."""

    request: "Request"
    preemptions: int
    first: int
    lookup: Lookup
    asked_at: float
    noted: bool = False
    """Whether the ledger has been told what the answer did not find (once: it may be stored meanwhile)."""

    def fits(self, request: "Request", first: int, epoch: str, now: float) -> bool:
        """Whether the answer is (or will be) an answer to this question."""
        return (
            self.request is request
            and self.preemptions == request.num_preemptions
            and self.first == first
            and self.lookup.epoch == epoch
            and now - self.asked_at < ANSWER_VALID_S
        )


def pin_budget(settings: Settings, plan: GroupPlan) -> int:
    """Most blocks that may be pinned at once.

    A fraction of the pool, but always such that one request of full length (and the null block) still fits beside the
    pins, however long a store hangs; at least 1 in a pool that is too small for both.
    """
    if settings.max_pinned_blocks is not None:
        return min(settings.max_pinned_blocks, plan.num_blocks)
    spare = plan.num_blocks - 1 - plan.max_blocks_per_request
    return max(1, min(int(plan.num_blocks * settings.max_pinned_fraction), spare))


def _fields(job: Job | None) -> dict[str, Any]:
    """A job as it stands in a recording."""
    if job is None:
        return {"job": None}
    return {
        "job": job.job_id,
        "gen": job.generation,
        "blocks": list(job.block_ids),
        "names": list(map(short, job.hashes)),
    }


def make_trace(settings: Settings, plan: GroupPlan) -> TraceRecorder | None:
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


class SchedulerSide:
    """Everything that runs in vLLM's EngineCore process."""

    def __init__(
        self,
        *,
        settings: Settings,
        plan: GroupPlan,
        keys: KeySpace,
        lookups: LookupService | None,
        may_save: bool,
        trace: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._keys = keys
        self._lookups = lookups
        self._may_save = may_save
        self._trace = trace
        self._clock = clock
        self._ledger = Ledger(
            num_ranks=plan.num_ranks,
            max_pinned_blocks=pin_budget(settings, plan),
            max_store_attempts=settings.max_store_attempts,
            stall_timeout_s=settings.stall_timeout_s,
            retry_backoff_s=settings.retry_backoff_s,
        )
        self._admissions = Admissions()
        self._asked: dict[str, Asked] = {}
        self._failed_hits: set[str] = set()
        self._accepted: list[tuple[str, list[int], list[bytes]]] = []
        self._cancelled: list[int] = []
        self._saving: dict[str, None] = {}  # requests with blocks left to store, in admission order
        self._pool: BlockPool | None = None
        self.block_table: Callable[[str], Sequence[int]] = lambda _: ()
        self._wait_allowance_s = self._step_allowance()
        self._hit_tokens = 0
        self._loads_accepted = 0

    def bind_pool(self, pool: "BlockPool") -> None:
        """vLLM's GPU block pool, in which store jobs hold references."""
        self._pool = pool

    def bind_tables(self, block_table: Callable[[str], Sequence[int]]) -> None:
        """How to look up a request's block ids outside `build_connector_meta`."""
        self.block_table = block_table

    @property
    def pool(self) -> "BlockPool":
        """The bound block pool.

        Raises:
            ProtocolError: vLLM has not bound it.
        """
        if self._pool is None:
            raise ProtocolError("vLLM has not bound its block pool (bind_gpu_block_pool)", action="EmitStore")
        return self._pool

    # -- lookup ------------------------------------------------------------

    def _step_allowance(self) -> float:
        return self._settings.lookup_wait_s if self._settings.lookup_async else self._settings.lookup_timeout_s

    def match(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the store can add to `num_computed_tokens` (block aligned), and whether they load asynchronously.

        (None, False) while unknown, for a bounded time. At least one token is always left to compute.
        """
        first = num_computed_tokens // self._plan.block_size
        last = self._last_block(request)
        if self._lookups is None or last <= first or not self._may_load(request):
            return 0, False
        asked = self._ask(request, first, last, self._lookups)
        found = self._await(asked.lookup, self._lookups)
        if found is None:
            return None, False
        if asked.lookup.missed is not None and not asked.noted:
            self._forget([asked.lookup.missed])
        asked.noted = True
        tokens = found * self._plan.block_size
        if tokens == 0 or tokens < self._settings.min_load_tokens:
            return 0, False
        return tokens, self._settings.load_async

    def _last_block(self, request: "Request") -> int:
        complete = (request.num_tokens - 1) // self._plan.block_size
        return min(complete, len(request.block_hashes) // self._plan.hashes_per_block)

    def _may_load(self, request: "Request") -> bool:
        if request.request_id in self._failed_hits or request.skip_reading_prefix_cache:
            return False
        limit = self._settings.max_loads_in_flight
        return limit is None or self._ledger.loads_in_flight() + len(self._accepted) < limit

    def _ask(self, request: "Request", first: int, last: int, lookups: LookupService) -> Asked:
        now = self._clock()
        asked = self._asked.get(request.request_id)
        if asked is None or not asked.fits(request, first, self._ledger.epoch, now):
            hashes = self._plan.block_hashes(request.block_hashes, first, last)
            lookup = lookups.ask(hashes, self._ledger.epoch)
            asked = Asked(request, request.num_preemptions, first, lookup, now)
            self._asked[request.request_id] = asked
        return asked

    def _await(self, lookup: Lookup, lookups: LookupService) -> int | None:
        """The answer; waits no longer than what is left of this step's allowance."""
        before = time.monotonic()
        found = lookups.result(lookup, self._wait_allowance_s)
        self._wait_allowance_s = max(0.0, self._wait_allowance_s - (time.monotonic() - before))
        return found

    # -- admission ---------------------------------------------------------

    def admitted(self, request: "Request", block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM admitted the request with `num_external_tokens` (any number up to what `match` said) to be loaded.

        Raises:
            ProtocolError: tokens to load without a lookup that offered them.
        """
        asked = self._asked.pop(request.request_id, None)
        # Nothing computed: a first admission, or one after a load of which nothing arrived (vLLM has freed its blocks).
        if not self._admissions.is_current(request) or request.num_computed_tokens == 0:
            self._admissions.begin(request)
            generation = self._ledger.begin_generation(request.request_id)
            self._saving[request.request_id] = None
            if self._trace is not None:
                fields = {"external": num_external_tokens, **self._known_table(request, block_ids)}
                self._trace.record("BeginGeneration", req=request.request_id, gen=generation, **fields)
        if num_external_tokens <= 0:
            return
        if asked is None or not asked.lookup.found:
            raise ProtocolError(
                f"vLLM accepted {num_external_tokens} external tokens for {request.request_id!r}, none were offered",
                action="EmitLoad",
            )
        blocks = min(-(-num_external_tokens // self._plan.block_size), asked.lookup.found)
        targets = list(block_ids[asked.first : asked.first + blocks])
        self._accepted.append((request.request_id, targets, list(asked.lookup.hashes[:blocks])))
        self._hit_tokens += num_external_tokens
        self._loads_accepted += 1

    # -- one step ----------------------------------------------------------

    def build_step(self, output: "SchedulerOutput") -> StepPlan:
        """Emit this step's jobs. Called exactly once per schedule, also for empty steps."""
        now = self._clock()
        self._wait_allowance_s = self._step_allowance()
        for request_id in output.preempted_req_ids or ():
            if self._admissions.end_if_preempted(request_id):
                self._end_generation(request_id, "preempted")
        jobs = self._emit_loads(now)
        if self._may_save:
            jobs += self._emit_stores(output, now)
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepPlan(namespace=self._keys.namespace, jobs=tuple(jobs), cancelled=cancelled)

    def _emit_loads(self, now: float) -> list[Job]:
        accepted, self._accepted = self._accepted, []
        sync = not self._settings.load_async
        jobs = [self._ledger.emit_load(r, targets, hashes, sync=sync, now=now) for r, targets, hashes in accepted]
        if self._trace is not None:
            for (request_id, _, _), job in zip(accepted, jobs, strict=True):
                self._trace.record("EmitLoad", req=request_id, sync=sync, **_fields(job))
        return jobs

    def _emit_stores(self, output: "SchedulerOutput", now: float) -> list[Job]:
        """Only requests with blocks left to store are looked at: a step of pure decoding costs nothing."""
        jobs = []
        for request_id in list(self._saving):
            request = self._admissions.request(request_id)
            if request is None:
                del self._saving[request_id]
            elif request_id in output.num_scheduled_tokens:
                storable = self._storable(request, output.num_scheduled_tokens[request_id])
                if self._ledger.wants_store(request_id, storable, now):
                    job = self._emit_store(output, request, storable, now)
                    jobs += [job] if job is not None else []
                if self._ledger.is_through(request_id, self._limit(request)):
                    del self._saving[request_id]
        return jobs

    def _limit(self, request: "Request") -> int:
        """Blocks of the request that may ever be stored."""
        tokens = request.max_tokens + request.num_prompt_tokens
        if not self._settings.save_decode_cache:
            tokens = request.num_prompt_tokens
        return tokens // self._plan.block_size

    def _storable(self, request: "Request", num_scheduled: int) -> int:
        """Leading blocks whose KV is right once this step has run.

        Draft tokens lie beyond `num_tokens` and never count; a block without a hash cannot be named.
        """
        tokens = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        if not self._settings.save_decode_cache:
            tokens = min(tokens, request.num_prompt_tokens)
        publishable = getattr(request, "num_publishable_block_hashes", len(request.block_hashes))
        return min(tokens // self._plan.block_size, publishable // self._plan.hashes_per_block)

    def _emit_store(self, output: "SchedulerOutput", request: "Request", storable: int, now: float) -> Job | None:
        state = output.kv_connector_block_state
        table = state.get_block_ids(request.request_id) if state is not None else None
        if table is None:
            raise ProtocolError(
                f"vLLM offers no block table for scheduled request {request.request_id!r} (needs vLLM 0.32 or later)",
                action="EmitStore",
            )
        hashes: Sequence[bytes] = (
            request.block_hashes
            if self._plan.hashes_per_block == 1
            else self._plan.block_hashes(request.block_hashes, 0, storable)
        )
        before = self._ledger.progress(request.request_id) if self._trace is not None else None
        job = self._ledger.emit_store(request.request_id, storable, table[0], hashes, now=now)
        if self._trace is not None:
            after = self._ledger.progress(request.request_id)
            if job is not None or after != before:  # not while the store is left alone, step after step
                fields = {"storable": storable, **self._known_table(request, table[0]), **_fields(job)}
                fields.setdefault("gen", self._ledger.generation(request.request_id))
                fields["frontier"], fields["retry"] = after
                self._trace.record("EmitStore", req=request.request_id, **fields)
        if job is not None:
            self._pin(job)
        return job

    def _known_table(self, request: "Request", block_ids: Sequence[int]) -> dict[str, Any]:
        """A block table as it stands in a recording, with the hashes of those of its blocks that have one."""
        named = min(len(block_ids), len(request.block_hashes) // self._plan.hashes_per_block)
        hashes = self._plan.block_hashes(request.block_hashes, 0, named)
        return {"table": list(block_ids), "hashes": list(map(short, hashes))}

    def _pin(self, job: Job) -> None:
        """Take the block-pool references that the ledger has noted for the job."""
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids])

    # -- results -----------------------------------------------------------

    def apply_reports(self, reports: Iterable[Report]) -> None:
        """`ApplyReport` for each report of this step."""
        now = self._clock()
        for report in reports:
            settled = self._ledger.apply_report(report, now)
            if self._trace is not None:
                fields = {"rank": report.rank, "result": report.result.name, "bad": list(report.bad)}
                if settled is not None:
                    fields["retry"] = self._ledger.progress(settled.request_id)[1]
                    fields["tainted"] = settled.tainted
                self._trace.record("ApplyReport", job=report.job_id, **fields)
            if settled is not None:
                self._settle(settled)

    def _settle(self, settled: Settled) -> None:
        if settled.released:
            if self._trace is not None:
                self._trace.record("Release", job=settled.job.job_id, blocks=list(settled.released))
            self._release(settled.released)
            if settled.bad and settled.current:
                self._saving[settled.request_id] = None
        if settled.job.kind is Kind.LOAD and settled.bad:
            self._forget([settled.job.hashes[p] for p in settled.bad])
            if settled.current:
                self._failed_hits.add(settled.request_id)
            self._evict_tainted(settled)

    def _evict_tainted(self, settled: Settled) -> None:
        """Take blocks that rest on a failed synchronous load out of vLLM's prefix cache.

        They were hashed when the load was planned. Under policy `recompute` core leaves them there and relies on the
        request to recompute them; if that is preempted or aborted first, others would hit wrong bytes.
        """
        lost = {settled.job.block_ids[p] for p in settled.bad}
        for request_id in settled.tainted:
            table = self.block_table(request_id)
            first = next((i for i, b in enumerate(table) if b in lost), len(table))
            if self._trace is not None:
                fields = {"req": request_id, "blocks": list(table[first:])}
                self._trace.record("EvictTainted", job=settled.job.job_id, **fields)
            self.pool.evict_blocks(set(table[first:]))

    def _forget(self, hashes: Sequence[bytes]) -> None:
        if self._trace is not None:
            self._trace.record("Forget", names=list(map(short, hashes)))
        self._ledger.forget_known(hashes)

    def _release(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[b] for b in block_ids])

    def finished(self, request: "Request") -> None:
        """The request ended (finished, aborted, failed). Its jobs run on; a load still queued is not needed any
        more."""
        if self._admissions.end(request):
            load = self._ledger.open_load(request.request_id)
            if load is not None:
                self._cancelled.append(load)
            self._end_generation(request.request_id, "finished")
        elif self._trace is not None:
            self._trace.record("EndRequest", req=request.request_id)
        self._asked.pop(request.request_id, None)
        self._failed_hits.discard(request.request_id)

    def _end_generation(self, request_id: str, why: str) -> None:
        if self._trace is not None:
            self._trace.record("EndGeneration", req=request_id, gen=self._ledger.generation(request_id), why=why)
        self._ledger.end_generation(request_id)

    # -- questions ---------------------------------------------------------

    def has_pending_block_frees(self) -> bool:
        """See `Ledger.has_pending_frees`."""
        blocks = self.pool.blocks
        return self._ledger.has_pending_frees(lambda b: int(blocks[b].ref_cnt), self._clock())

    def has_open_jobs(self) -> bool:
        """See `Ledger.has_open_jobs`."""
        return self._ledger.has_open_jobs()

    def reset(self) -> bool:
        """`Reset`: what was stored before is never served to this engine again (new key epoch).

        Returns False if loads of the old epoch are still in flight: their requests finish on old KV.
        """
        loading = self._ledger.reset(secrets.token_hex(4))
        self._admissions.keep_only(loading)
        self._asked.clear()
        if self._trace is not None:
            self._trace.record("Reset", epoch=self._ledger.epoch, loading=sorted(loading))
        return not loading

    def snapshot(self) -> dict[str, Any]:
        """Figures for operators, the demo and tests; plain values."""
        ledger = self._ledger.snapshot()
        return {
            "blocks_pinned": ledger.pins.blocks,
            "blocks_pinned_max": ledger.pins.blocks_max,
            "open_jobs": ledger.open_jobs,
            "generations": ledger.generations,
            "store_jobs": ledger.settled[Kind.STORE.value],
            "load_jobs": ledger.settled[Kind.LOAD.value],
            "declined": ledger.declined,
            "hit_tokens": self._hit_tokens,
            "loads_accepted": self._loads_accepted,
            "lookups": asdict(self._lookups.counters) if self._lookups is not None else {},
            "namespace": self._keys.namespace,
        }

    def close(self) -> None:
        """End the lookup thread and its client, bounded."""
        if self._lookups is not None:
            self._lookups.close(self._settings.shutdown_timeout_s)
            self._lookups = None
        if self._trace is not None:
            self._trace.close()
