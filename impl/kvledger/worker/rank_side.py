"""The rank side of the connector, behind vLLM's worker hooks. Knows jobs, never requests.

Hook → action: `bind` (jobs told; leftovers of a step whose saves were never submitted are dropped), `start_loads` →
`RankAccept` for loads, `submit_stores` → `RankAccept` for stores behind a compute fence, `collect` → `TakeReports`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from kvledger.config import Settings
from kvledger.errors import ConfigError
from kvledger.keys import KeySpace
from kvledger.mooncake.client import StoreClient
from kvledger.observe.faults import Faults
from kvledger.protocol import Breaker, Job, Kind, RankLedger, RankSnapshot, RankView, Report, Result, StepPlan
from kvledger.shutdown import shutdown_budget_s
from kvledger.worker.desk import Desk
from kvledger.worker.fence import Fence, record_fence
from kvledger.worker.lanes import RESTART_PAUSE_S, START_TIMEOUT_S, Lane
from kvledger.worker.layout import CacheLayout
from kvledger.worker.staging import StagingArea
from kvledger.worker.transfer import Transfer

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 2e-3
"""Longest wait for a report in a step without a forward. Core makes such steps back to back while a transfer is all that
it waits for, and each takes the interpreter away from the transfer's thread."""


@dataclass(slots=True)
class StepResults:
    """What one rank answers in one step."""

    reports: list[Report] = field(default_factory=list)
    finished_loads: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures(RankSnapshot):
    """The ledger's figures, and what went wrong so far."""

    faults: dict[str, int]
    """Occurrences by kind; codes by object. Each failed job raises one kind at least."""
    breakers: dict[str, int]
    """How often each lane's breaker opened, probed and closed."""
    lanes: dict[str, bool]
    """Which lanes are alive. None at all: this rank only computes."""


class RankSide:
    """One rank: its ledger, its lanes, its view of the KV cache. Hooks come from one thread (vLLM's worker loop)."""

    def __init__(
        self,
        *,
        settings: Settings,
        rank: int,
        keys: KeySpace,
        client: StoreClient,
        clock: Callable[[], float] = time.monotonic,
        record_fence: Callable[[torch.device], Fence] = record_fence,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._keys = keys
        self._client = client
        self._clock = clock
        self._record_fence = record_fence
        self._direct = settings.resolved_transfer_mode == "direct"
        stuck_after_s = settings.transfer_timeout_s + (settings.quarantine_s if self._direct else 0.0)
        self._desk = Desk(RankLedger(rank=rank, stuck_after_s=stuck_after_s, quarantine_s=settings.quarantine_s), clock)
        self._faults = Faults(f"rank {rank}")
        self._lanes: dict[Kind, Lane] = {}
        self._device = torch.device("cpu")
        self._fences: dict[int, Fence] = {}
        self._told: dict[int, Job] = {}
        self._forward = True
        self._loads: dict[int, tuple[Job, float]] = {}  # open loads, and when each is given up
        self._given_up: set[int | None] = set()
        self._results = StepResults()
        self._closed = False

    # -- start -------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Lay out the KV cache, register memory with the store, start the lanes (vLLM hook `register_kv_caches`).

        A rank without KV layers starts no lane and drops every job it is told.

        Raises:
            ConfigError: a layout that is not supported, or a block that fits no batch.
            StoreError: the store refused to register the memory.
        """
        if not kv_caches:
            logger.warning("rank %d has no KV cache layers: it reports every job as dropped", self._rank)
            return
        layout = CacheLayout.from_tensors(kv_caches, num_blocks)
        self._device = layout.device
        if self._direct:
            for address, size in layout.regions():
                self._client.register(address, size)
        # One breaker per lane: each is used by its own thread only.
        self._lanes = {kind: self._lane(kind, layout) for kind in Kind}
        logger.info(
            "rank %d: %d blocks of %d bytes in %d runs (%s), %s transfers",
            self._rank,
            layout.num_blocks,
            layout.object_bytes,
            layout.segments_per_object,
            layout.describe(),
            self._settings.resolved_transfer_mode,
        )
        for lane in self._lanes.values():
            if not lane.start():
                logger.error(
                    "kvledger rank %d: the %s lane is not ready (a failure, or longer than %g s); until it is, its jobs "
                    "are dropped",
                    self._rank,
                    lane.kind.value,
                    START_TIMEOUT_S,
                )

    def _lane(self, kind: Kind, layout: CacheLayout) -> Lane:
        staging = None if self._direct else self._staging(layout)
        transfer = Transfer(
            desk=self._desk,
            client=self._client,
            layout=layout,
            keys=self._keys,
            shard=self._rank,
            staging=staging,
            batch_objects=self._direct_batch(layout) if staging is None else staging.batch_objects,
            breaker=Breaker(
                threshold=self._settings.breaker_failures,
                initial_s=self._settings.breaker_open_s,
                max_s=60.0,
            ),
            faults=self._faults,
            fence_timeout_s=self._settings.transfer_timeout_s,
            clock=self._clock,
        )
        device = layout.device

        def prepare() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.set_stream(torch.cuda.Stream(device))

        def run(job: Job) -> None:
            transfer.run(job, self._fences.pop(job.job_id, Fence(None)))

        return Lane(kind, self._desk, run=run, prepare=prepare, lost=self._lost)

    def _lost(self, kind: Kind, job: Job | None, error: BaseException, over: bool) -> None:
        """A lane died: report its job (nobody knows what was moved) and those that wait for it. Runs in the lane."""
        if job is not None and self._desk.proceed(job.job_id):
            bad = tuple(range(len(job.block_ids)))
            if self._direct:
                self._desk.quarantine(job.job_id, bad)
            else:
                self._desk.finish(job.job_id, Result.INDETERMINATE, bad)
        ends, then = "died", f"it starts again in {RESTART_PAUSE_S:g} s; if this comes again, report it"
        if over:
            ends = "ended"
            then = f"it died too often: from now on this rank only computes and will {kind.value} nothing; restart vLLM"
        cause = f"{type(error).__name__}: {error!s:.300}"
        self._faults.record(f"{kind.value} lane {ends}", f"{cause}; {then}", level=logging.ERROR, error=error)
        self._dropped(f"{kind.value} lane is down", self._desk.drop_queued(kind))

    def _staging(self, layout: CacheLayout) -> StagingArea:
        area = StagingArea(
            total_bytes=self._settings.staging_bytes // len(Kind),
            batch_bytes=self._settings.max_batch_bytes,
            object_bytes=layout.object_bytes,
            pin_memory=layout.device.type == "cuda",
            quarantine_s=self._settings.quarantine_s,
        )
        area.register(self._client.register)
        return area

    def _direct_batch(self, layout: CacheLayout) -> int:
        """Objects per call such that both lanes together stay below the segment and byte limits."""
        by_segments = self._settings.max_segments_in_flight // len(Kind) // layout.segments_per_object
        by_bytes = self._settings.max_batch_bytes // layout.object_bytes
        if min(by_segments, by_bytes) < 1:
            raise ConfigError(
                field="transfer_mode",
                value="direct",
                remedy=f"one block is {layout.segments_per_object} segments of {layout.object_bytes} bytes together, "
                "more than max_segments_in_flight / 2 or max_batch_bytes allow; use transfer_mode staged",
            )
        return min(by_segments, by_bytes)

    # -- one step ----------------------------------------------------------

    def bind(self, plan: StepPlan) -> None:
        """A step's jobs are told (vLLM hook `bind_connector_metadata`); `RankDrop` of those of an earlier step that were
        never submitted.

        Raises:
            ConfigError: the scheduler side names objects in another namespace than this rank.
        """
        if plan.namespace != self._keys.namespace:
            raise ConfigError(
                field="namespace",
                value=plan.namespace,
                remedy=f"rank {self._rank} works in namespace {self._keys.namespace}: scheduler and ranks see "
                "different model files, settings or hardware; make them equal, or set weights_version",
            )
        self._drop_told("never submitted")
        self._forward = plan.forward
        self._told = {job.job_id: job for job in plan.jobs}
        late = self._clock() + self._settings.load_timeout_s
        self._loads.update((job.job_id, (job, late)) for job in plan.jobs if job.kind is Kind.LOAD)
        for job_id in plan.cancelled:
            if self._desk.cancel(job_id):
                self._dropped("aborted", 1, logging.DEBUG)

    def start_loads(self) -> None:
        """`RankAccept` for the step's loads; waits for the synchronous ones (vLLM hook `start_load_kv`).

        Raises:
            StuckCopyError: a local copy into KV blocks does not end.
        """
        jobs = self._accept(Kind.LOAD)
        for job in jobs:
            if job.sync and not self._desk.wait_over(
                job.job_id, self._settings.load_timeout_s, self._settings.transfer_timeout_s
            ):
                self._late_load()
                self._given_up.add(job.job_id)

    def submit_stores(self, *, forward_failed: bool) -> None:
        """`RankAccept` for the step's stores behind a compute fence (vLLM hook `wait_for_save`).

        After a forward that raised, nothing of the step may be published: its stores are dropped.
        """
        if forward_failed:
            self._drop_told("the forward failed")
            return
        self._accept(Kind.STORE)

    def _accept(self, kind: Kind) -> list[Job]:
        jobs = [j for j in self._told.values() if j.kind is kind]
        if not jobs:
            return jobs
        obstacle = self._obstacle(kind)
        fence = self._record_fence(self._device) if not obstacle else Fence(None)
        for job in jobs:
            del self._told[job.job_id]
            if obstacle:
                self._desk.drop(job)
            else:
                self._fences[job.job_id] = fence
                self._desk.accept(job)
        if obstacle:
            self._dropped(obstacle, len(jobs))
        else:
            self._drop_if_down(kind)
        return jobs

    def _obstacle(self, kind: Kind) -> str:
        """Why no job of this kind can be run now; empty if it can."""
        lane = self._lanes.get(kind)
        if self._closed:
            return "shutdown"
        if lane is None:
            return "no KV cache layers"
        if not lane.alive:
            return f"{kind.value} lane is down"
        return f"{kind.value} lane is inside a call that does not end" if lane.running in self._given_up else ""

    def _drop_if_down(self, kind: Kind) -> None:
        """A lane may die between a look at it and the queuing of a job: then nobody else would report the job."""
        if not self._lanes[kind].alive:
            self._dropped(f"{kind.value} lane is down", self._desk.drop_queued(kind))

    def _dropped(self, why: str, jobs: int, level: int = logging.INFO) -> None:
        if jobs:
            self._faults.record(f"dropped: {why}", "jobs reported without having run", count=jobs, level=level)

    def _late_load(self) -> None:
        self._faults.record("late load", f"not there after {self._settings.load_timeout_s:g} s (load_timeout_s)")

    def _stuck(self, count: int) -> None:
        if count:
            bound = self._settings.transfer_timeout_s
            self._faults.record("given up", f"a call to the store has not ended within {bound:g} s", count=count)

    def _drop_told(self, why: str) -> None:
        """`RankDrop` of jobs told but never submitted (a step whose hook was skipped, a forward that raised)."""
        for job in self._told.values():
            self._desk.drop(job)
        self._dropped(why, len(self._told))
        self._told = {}

    def collect(self) -> None:
        """`TakeReports`: take the reports that are ready, once per step (vLLM hook `get_finished` or `get_transfer_results`).

        In a step without a forward it waits up to `IDLE_WAIT_S` for one.
        """
        if not self._forward:
            self._desk.wait_report(IDLE_WAIT_S)
        stuck = self._desk.expire()
        self._stuck(len(stuck))
        self._given_up.update(stuck)
        self._end_late_loads()
        self._given_up &= {lane.running for lane in self._lanes.values()}
        for kind in self._lanes:
            obstacle = self._obstacle(kind)
            if obstacle:
                self._dropped(obstacle, self._desk.drop_queued(kind))
        reports = self._desk.take_reports()
        for report in reports:
            self._fences.pop(report.job_id, None)
            job, _ = self._loads.pop(report.job_id, (None, 0.0))
            if job is not None:
                self._results.bad_blocks.update(job.block_ids[p] for p in report.bad)
                if job.reply_to:
                    self._results.finished_loads.add(job.reply_to)
        self._results.reports.extend(reports)

    def _end_late_loads(self) -> None:
        """A load that takes longer than its request should wait is failed, unless bytes may move in its blocks."""
        now = self._clock()
        for job_id in [j for j, (_, late) in self._loads.items() if now >= late]:
            if self._desk.cancel(job_id):
                self._late_load()
            elif not self._direct and self._desk.give_up(job_id):
                self._late_load()
                self._given_up.add(job_id)

    def take_finished_loads(self) -> set[str]:
        """Request ids of loads that ended on this rank, each once."""
        out, self._results.finished_loads = self._results.finished_loads, set()
        return out

    def take_bad_blocks(self) -> set[int]:
        """Ids of blocks whose load did not provably arrive, each once, no later than the load's end."""
        out, self._results.bad_blocks = self._results.bad_blocks, set()
        return out

    def take_reports(self) -> list[Report]:
        """`TakeReports`: reports for the scheduler side, each once."""
        out, self._results.reports = self._results.reports, []
        return out

    # -- end ---------------------------------------------------------------

    def view(self) -> RankView:
        """The rank's ledger in the model's words; a copy."""
        return self._desk.view()

    def snapshot(self) -> RankFigures:
        """Figures for gauges and tests."""
        return RankFigures(
            **asdict(self._desk.snapshot()),
            faults=self._faults.counts(),
            breakers=self._faults.transitions(),
            lanes={kind.value: lane.alive for kind, lane in self._lanes.items()},
        )

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job is open on this rank."""
        return self._desk.wait_idle(timeout_s)

    def close(self) -> None:
        """Report what is queued, end the lanes, close the client. Idempotent.

        Bounded by `shutdown_timeout_s` and by what vLLM grants, whatever hangs: see `shutdown_budget_s`.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + shutdown_budget_s(self._settings.shutdown_timeout_s)
        for kind in Kind:
            self._dropped("shutdown", self._desk.drop_queued(kind))
        for lane in self._lanes.values():
            if not lane.stop(max(0.1, deadline - time.monotonic())):
                self._leave(lane)
        self._client.close(max(0.1, deadline - time.monotonic()))
        self._faults.flush()

    def _leave(self, lane: Lane) -> None:
        """The lane is still inside a call at shutdown: what it does to a slot is nobody's concern any more."""
        logger.warning("rank %d: %s lane is still inside a store call at shutdown", self._rank, lane.kind.value)
        if lane.running is not None and not self._direct and self._desk.give_up(lane.running):
            self._stuck(1)
