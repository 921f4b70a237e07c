"""The scheduler side behind vLLM's hooks: translates vLLM's objects for the ledger and its decisions back. One thread.

Hook → action: `get_num_new_matched_tokens` → lookup; `update_state_after_alloc` → `BeginGeneration`;
`build_connector_meta` → `EndGeneration` of preempted requests, `EmitLoad`, `EmitStore`; `update_connector_output` →
`ApplyReport`; `request_finished` → `EndGeneration`; `reset_cache` → `Reset`, `ResetRefused`.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvledger.config import Settings
from kvledger.errors import ProtocolError
from kvledger.groups import GroupPlan
from kvledger.identity.adapters import Adapters
from kvledger.keys import KeySpace
from kvledger.observe.actions import Actions
from kvledger.observe.trace import TraceRecorder
from kvledger.protocol import Job, Kind, Ledger, LedgerView, Report, Settled, StepPlan
from kvledger.scheduler.admissions import Admissions
from kvledger.scheduler.hits import Hits
from kvledger.scheduler.lookup import LookupService
from kvledger.scheduler.names import BlockNames

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideView:
    """The scheduler side in the model's words: the ledger's state, and what is kept per request beside it."""

    ledger: LedgerView
    asked: frozenset[str]
    """Requests with a lookup of their own."""
    admitted: int
    """Admissions that are known."""


class SchedulerSide:
    """Everything that runs in vLLM's EngineCore process."""

    def __init__(
        self,
        *,
        settings: Settings,
        plan: GroupPlan,
        keys: KeySpace,
        ledger: Ledger,
        lookups: LookupService | None,
        may_save: bool,
        recorder: TraceRecorder | None,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._keys = keys
        self._lookups = lookups
        self._may_save = may_save
        self._clock = clock
        self._ledger = ledger
        self._actions = Actions(recorder, ledger)
        self._block_names = BlockNames(plan, Adapters())
        self._hits = Hits(
            settings=settings,
            plan=plan,
            names=self._block_names,
            ledger=ledger,
            lookups=lookups,
            clock=clock,
            forget=self._forget,
        )
        self._admissions = Admissions()
        self._accepted: list[tuple[str, list[int], list[bytes]]] = []
        self._cancelled: list[int] = []
        self._saving: dict[str, None] = {}  # requests with blocks left to store, in admission order
        self._pool: BlockPool | None = None
        self.block_table: Callable[[str], Sequence[int]] = lambda _: ()
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

    def match(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """`ExternalHit`, asked within an `Admit…` step or before one; see `Hits.match`."""
        return self._hits.match(request, num_computed_tokens, len(self._accepted))

    # -- admission ---------------------------------------------------------

    def admitted(self, request: "Request", block_ids: Sequence[int], num_external_tokens: int) -> None:
        """`AdmitCompute` (no external tokens), `AdmitLoad` or `AdmitSyncLoad`: vLLM admitted the request.

        `num_external_tokens` are to be loaded, any number up to what `match` said.

        Raises:
            ProtocolError: tokens to load without a lookup that offered them.
        """
        asked = self._hits.take(request.request_id)
        # Nothing computed: a first admission, or one after a load of which nothing arrived (vLLM has freed its blocks).
        if not self._admissions.is_current(request) or request.num_computed_tokens == 0:
            self._admissions.begin(request)
            generation = self._ledger.begin_generation(request.request_id)
            self._saving[request.request_id] = None
            self._actions.begin_generation(
                request.request_id, generation, block_ids, self._names(request), num_external_tokens
            )
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
        """The end of each `schedule()`: `Compute`, `AdmitCompute`, `AdmitLoad`, `AdmitSyncLoad`, `EmptyStep` (the model's
        `BuildMeta`). Emits this step's jobs; called exactly once per schedule, also for empty steps.

        Ids listed as preempted end their generation first, but only if it is older than the preemption: after a reset
        vLLM re-admits a request in the same schedule that lists it (contract G7), and ending by id alone would end the
        new generation.
        """
        now = self._clock()
        self._hits.new_step()
        for request_id in output.preempted_req_ids or ():
            if self._admissions.end_if_preempted(request_id):
                self._end_generation(request_id, "preempted")
        jobs = self._emit_loads(now)
        if self._may_save:
            jobs += self._emit_stores(output, now)
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepPlan(
            namespace=self._keys.namespace,
            jobs=tuple(jobs),
            cancelled=cancelled,
            forward=bool(output.num_scheduled_tokens),
        )

    def _emit_loads(self, now: float) -> list[Job]:
        accepted, self._accepted = self._accepted, []
        sync = not self._settings.load_async
        jobs = []
        for request_id, targets, hashes in accepted:
            job = self._ledger.emit_load(request_id, targets, hashes, sync=sync, now=now)
            self._actions.emit_load(request_id, job)
            jobs.append(job)
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
                    names = self._block_names.of(request)
                    if names is None:
                        del self._saving[request_id]
                        continue
                    job = self._emit_store(output, request, storable, names, now)
                    jobs += [job] if job is not None else []
                if not request.resumable and self._ledger.is_through(request_id, self._limit(request)):
                    del self._saving[request_id]  # a streaming-input session stays: its prompt may grow
        return jobs

    def _limit(self, request: "Request") -> int:
        """Blocks of the request that may ever be stored."""
        tokens: int = request.max_tokens + request.num_prompt_tokens
        if not self._settings.save_decode_cache:
            tokens = request.num_prompt_tokens
        return tokens // self._plan.block_size

    def _storable(self, request: "Request", num_scheduled: int) -> int:
        """`Storable`: leading blocks whose KV is right once this step has run.

        Draft tokens lie beyond `num_tokens` and never count; a block without a hash cannot be named.
        """
        tokens: int = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        if not self._settings.save_decode_cache:
            tokens = min(tokens, request.num_prompt_tokens)
        # Not in vLLM 0.32.0; a vLLM that publishes hashes only after the draft model's KV is there says so by this field.
        publishable: int = getattr(request, "num_publishable_block_hashes", len(request.block_hashes))
        return min(tokens // self._plan.block_size, publishable // self._plan.hashes_per_block)

    def _emit_store(
        self, output: "SchedulerOutput", request: "Request", storable: int, names: Sequence[bytes], now: float
    ) -> Job | None:
        state = output.kv_connector_block_state
        table = state.get_block_ids(request.request_id) if state is not None else None
        if table is None:
            raise ProtocolError(
                f"vLLM offers no block table for scheduled request {request.request_id!r} (needs vLLM 0.32 or later)",
                action="EmitStore",
            )
        before = self._actions.progress(request.request_id)
        job = self._ledger.emit_store(request.request_id, storable, table[0], names, now=now)
        self._actions.emit_store(request.request_id, before, job, storable, table[0], self._names(request))
        if job is not None:
            self._pin(job)
        return job

    def _names(self, request: "Request") -> Callable[[int], list[bytes]]:
        """Names of the request's first n blocks, as far as it has them."""
        return lambda n: list((self._block_names.of(request) or ())[:n])

    def _pin(self, job: Job) -> None:
        """Take the block-pool references that the ledger has noted for the job."""
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids])

    # -- results -----------------------------------------------------------

    def apply_reports(self, reports: Iterable[Report]) -> None:
        """`UpdateFromOutput`: `ApplyReport` for each report of this step."""
        now = self._clock()
        for report in reports:
            settled = self._ledger.apply_report(report, now)
            self._actions.apply_report(report, settled)
            if settled is not None:
                self._settle(settled)

    def _settle(self, settled: Settled) -> None:
        if settled.released:
            self._actions.release(settled)
            self._release(settled.released)
            if settled.bad and settled.current:
                self._saving[settled.request_id] = None
        if settled.job.kind is Kind.LOAD and settled.bad:
            self._forget([settled.job.hashes[p] for p in settled.bad])
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
            self._actions.evict_tainted(settled, request_id, table[first:])
            self.pool.evict_blocks(set(table[first:]))

    def _forget(self, hashes: Sequence[bytes]) -> None:
        self._actions.forget(hashes)
        self._ledger.forget_known(hashes)

    def _release(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[b] for b in block_ids])

    def finished(self, request: "Request") -> None:
        """`Finish` and `Abort`: the request ended. Its jobs run on, and their pins stay; a load still queued is not needed
        any more."""
        self._evict_unproven(request.request_id)
        if self._admissions.end(request):
            load = self._ledger.open_load(request.request_id)
            if load is not None:
                self._cancelled.append(load)
            self._end_generation(request.request_id, "finished")
        else:
            self._actions.end_request(request.request_id)
        self._hits.take(request.request_id)
        self._ledger.end_request(request.request_id)

    def _evict_unproven(self, request_id: str) -> None:
        """Take blocks that rest on a synchronous load not reported yet out of vLLM's prefix cache.

        vLLM hears of aborts between a step's end and its output. The blocks are free then, hashed, and in no table any
        more when the report says that they were not filled.
        """
        table = self.block_table(request_id)
        unproven = table[self._ledger.proven(table) :]
        if unproven:
            self.pool.evict_blocks(set(unproven))

    def _end_generation(self, request_id: str, why: str) -> None:
        self._actions.end_generation(request_id, why)
        self._ledger.end_generation(request_id)

    # -- questions ---------------------------------------------------------

    def has_pending_block_frees(self) -> bool:
        """`HasPendingBlockFrees`: while it holds core waits, else `PreemptForSpace`. See `Ledger.has_pending_frees`."""
        blocks = self.pool.blocks
        return self._ledger.has_pending_frees(lambda b: int(blocks[b].ref_cnt), self._clock())

    def has_open_jobs(self) -> bool:
        """`HasPendingPushWork`: while it holds core makes an `EmptyStep` even without requests."""
        return self._ledger.has_open_jobs()

    def core_has_forgotten(self) -> bool:
        """Whether core has emptied its prefix cache: asked within `reset_cache`, which core calls also after it refused to.

        It refuses while any block but the null block is in use, by a request, a load or one of our pins (contract G12).
        """
        pool = self.pool
        return len(pool.cached_block_hash_to_block) == 0 and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def reset(self, *, refused: bool) -> bool:
        """`Reset`: what was stored before is never served to this engine again (new key epoch).

        `refused` (`ResetRefused`): core goes on with blocks of before, so nothing is stored or hit until a reset succeeds.
        Returns False then, and if loads of the old epoch are still in flight: their requests finish on old KV.
        """
        if refused:
            logger.warning(
                "kvledger: vLLM refused to reset its prefix cache (blocks are in use); nothing is stored or loaded until a "
                "reset succeeds: repeat it when no request, load or save is in flight"
            )
        loading = self._ledger.reset(secrets.token_hex(4), refused=refused)
        self._admissions.keep_only(loading)
        self._hits.clear()
        self._actions.reset(loading)
        return not loading and not refused

    def view(self) -> SideView:
        """The state in the model's words; a copy."""
        return SideView(ledger=self._ledger.view(), asked=self._hits.waiting(), admitted=len(self._admissions))

    def snapshot(self) -> dict[str, Any]:
        """Figures for operators, the demo and tests; plain values."""
        ledger = self._ledger.snapshot()
        return {
            "blocks_pinned": ledger.pins.blocks,
            "blocks_pinned_max": ledger.pins.blocks_max,
            "max_pinned": ledger.pins.max_blocks,
            "open_jobs": ledger.open_jobs,
            "generations": ledger.generations,
            "mute": self._ledger.mute,
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
        self._actions.close()
