# ruff: noqa: SLF001 - reaches into kvledger's private names on purpose
"""Bugs of the scheduler side: whom a report counts for, what is pinned, what is stored, what core is told."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from conformance.refinement.twins.patching import Patch, Swap, named_patch
from kvledger import assembly
from kvledger.protocol import Job, Kind, Ledger, Report, Result
from kvledger.protocol.ledger import OpenJob
from kvledger.protocol.pins import PinTable
from kvledger.protocol.tracker import Load, Tracker
from kvledger.scheduler.admissions import Admissions
from kvledger.scheduler.side import SchedulerSide
from kvledger.worker.fence import Fence
from kvledger.worker.rank_side import RankSide
from kvledger.worker.transfer import Transfer

SCHEDULER_PATCHES: dict[str, Patch] = {}


# -- references -------------------------------------------------------------


def _pins_only(part: slice) -> Iterator[Swap]:
    """References and pin table hold only a part of the blocks that a job reads."""
    pin = PinTable.pin

    def pin_part(self: PinTable, job_id: int, block_ids: tuple[int, ...]) -> None:
        pin(self, job_id, block_ids[part])

    def touch(self: SchedulerSide, job: Job) -> None:
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids[part]])

    yield PinTable, "pin", pin_part
    yield SchedulerSide, "_pin", touch


@named_patch(SCHEDULER_PATCHES, "no-pins")
def no_pins() -> Iterator[Swap]:
    """A store job holds no reference, and the ledger knows of none."""
    yield from _pins_only(slice(0, 0))


SCHEDULER_PATCHES["no-pins-poison"] = SCHEDULER_PATCHES["no-pins"]


@named_patch(SCHEDULER_PATCHES, "tail-not-pinned")
def tail_not_pinned() -> Iterator[Swap]:
    """The last block of a job is not pinned."""
    yield from _pins_only(slice(0, -1))


@named_patch(SCHEDULER_PATCHES, "release-on-success-only")
def release_on_success_only() -> Iterator[Swap]:
    """References go back only for a job without a failed block."""
    settle = SchedulerSide._settle

    def settled(self: SchedulerSide, outcome: Any) -> None:
        if not outcome.bad or outcome.job.kind is Kind.LOAD:
            settle(self, outcome)

    yield SchedulerSide, "_settle", settled


@named_patch(SCHEDULER_PATCHES, "unbounded-pins")
def unbounded_pins() -> Iterator[Swap]:
    """No budget: when the store stops answering, pins keep the pool from every request."""
    make = PinTable.__init__

    def init(self: PinTable, max_blocks: int) -> None:
        make(self, max_blocks + 10_000)

    yield PinTable, "__init__", init


# -- reports ----------------------------------------------------------------


@named_patch(SCHEDULER_PATCHES, "count-per-request")
def count_per_request() -> Iterator[Swap]:
    """As many reports as there are ranks, of any jobs of a request id, complete all its jobs."""

    def apply_reports(self: SchedulerSide, reports: list[Report]) -> None:
        ledger, now = self._ledger, self._clock()
        for report in reports:
            entry = ledger._open.get(report.job_id)
            if entry is not None:
                entry.waiting.discard(report.rank)
                entry.result = max(entry.result, report.result)
                entry.bad.update(report.bad)
        heard: dict[str, int] = {}
        for entry in ledger._open.values():
            heard[entry.request_id] = heard.get(entry.request_id, 0) + len(ledger._ranks - entry.waiting)
        for entry in list(ledger._open.values()):
            if heard[entry.request_id] >= len(ledger._ranks):
                self._settle(ledger._settle(entry, now))

    yield SchedulerSide, "apply_reports", apply_reports


@named_patch(SCHEDULER_PATCHES, "late-report-to-new-job")
def late_report_to_new_job() -> Iterator[Swap]:
    """A report counts for the latest job of its request id, which so appears to be over, and well."""
    apply = Ledger.apply_report

    def apply_report(self: Ledger, report: Report, now: float) -> Any:
        entry = self._open.get(report.job_id)
        latest = max((j for j, e in self._open.items() if entry and e.request_id == entry.request_id), default=None)
        if latest is None or report.rank not in self._open[latest].waiting:
            return None
        return apply(self, Report(job_id=latest, rank=report.rank, result=Result.DONE), now)

    yield Ledger, "apply_report", apply_report


@named_patch(SCHEDULER_PATCHES, "release-at-first-rank")
def release_at_first_rank() -> Iterator[Swap]:
    """A job is over when the first rank has reported; what comes later is swallowed."""
    apply = Ledger.apply_report

    def apply_report(self: Ledger, report: Report, now: float) -> Any:
        entry = self._open.get(report.job_id)
        if entry is None:
            return None
        entry.waiting = {report.rank}
        return apply(self, report, now)

    yield Ledger, "apply_report", apply_report


@named_patch(SCHEDULER_PATCHES, "report-counted-twice")
def report_counted_twice() -> Iterator[Swap]:
    """A report that comes a second time, with the next step, counts for a rank that has not reported."""
    take, said, apply = RankSide.take_reports, WeakKeyDictionary[RankSide, list[Report]](), Ledger.apply_report

    def take_reports(self: RankSide) -> list[Report]:
        last, said[self] = said.get(self, []), take(self)
        return [*said[self], *last]

    def apply_report(self: Ledger, report: Report, now: float) -> Any:
        entry = self._open.get(report.job_id)
        if entry is not None and report.rank not in entry.waiting:
            entry.waiting.pop()
            entry.waiting.add(report.rank)
        return apply(self, report, now)

    yield RankSide, "take_reports", take_reports
    yield Ledger, "apply_report", apply_report


# -- emission ---------------------------------------------------------------


@named_patch(SCHEDULER_PATCHES, "old-retry-in-new-table")
def old_retry_in_new_table() -> Iterator[Swap]:
    """Failed blocks of an older generation go to the tracker of the one that follows."""
    settled = Ledger._store_settled

    def store_settled(self: Ledger, entry: Any, current: Tracker | None, now: float) -> None:
        settled(self, entry, current or self._trackers.get(entry.request_id), now)

    yield Ledger, "_store_settled", store_settled


@named_patch(SCHEDULER_PATCHES, "resume-deletes-tracker")
def resume_deletes_tracker() -> Iterator[Swap]:
    """A request resumed in the step that lists it as preempted loses its new tracker, and its load."""

    def end(self: Admissions, request_id: str) -> bool:
        return self._current.pop(request_id, None) is not None

    emit = SchedulerSide._emit_loads

    def emit_loads(self: SchedulerSide, now: float) -> Any:
        self._accepted = [a for a in self._accepted if self._ledger.generation(a[0]) is not None]
        return emit(self, now)

    yield Admissions, "end_if_preempted", end
    yield SchedulerSide, "_emit_loads", emit_loads


@named_patch(SCHEDULER_PATCHES, "store-partial-blocks")
def store_partial_blocks() -> Iterator[Swap]:
    """A block counts as full though part of it is not computed yet."""

    def storable(self: SchedulerSide, request: Any, num_scheduled: int) -> int:
        size = self._plan.block_size
        tokens: int = min(request.num_computed_tokens + num_scheduled, request.num_prompt_tokens)
        return min(-(-tokens // size), len(request.block_hashes))

    yield SchedulerSide, "_storable", storable


@named_patch(SCHEDULER_PATCHES, "store-on-failed-load")
def store_on_failed_load() -> Iterator[Swap]:
    """Blocks are stored while the synchronous load they rest on is pending, from the step after the load's on."""
    emit_loads, of_this_step = SchedulerSide._emit_loads, set[int]()

    def noted(self: SchedulerSide, now: float) -> list[Job]:
        jobs = emit_loads(self, now)
        of_this_step.clear()
        of_this_step.update(j.job_id for j in jobs)
        return jobs

    def wants_store(self: Ledger, request_id: str, storable: int, _now: float) -> bool:
        tracker = self._trackers.get(request_id)
        return tracker is not None and tracker.may_store and tracker.load_job not in of_this_step and storable > 0

    yield SchedulerSide, "_emit_loads", noted
    yield Ledger, "wants_store", wants_store
    yield Tracker, "may_store", property(lambda self: self.load is not Load.TAINTED)


@named_patch(SCHEDULER_PATCHES, "store-on-shared-load")
def store_on_shared_load() -> Iterator[Swap]:
    """A second request shares the target of a pending synchronous load, stores it and what it computes on it."""
    yield Ledger, "_note_sync_loads", lambda _self, _tracker, _blocks: None


@named_patch(SCHEDULER_PATCHES, "failed-sync-load-not-tainted")
def failed_sync_load_not_tainted() -> Iterator[Swap]:
    """Requests that rest on a failed synchronous load may store again once they are truncated."""
    move = Tracker.move_load

    def trusted(self: Tracker, action: str) -> None:
        if action == "Taint":
            self.load = Load.FAILED
        else:
            move(self, action)

    yield Tracker, "move_load", trusted


@named_patch(SCHEDULER_PATCHES, "bad-blocks-stay-cached")
def bad_blocks_stay_cached() -> Iterator[Swap]:
    """Blocks of a failed synchronous load stay in the prefix cache, for the next request to hit."""
    yield SchedulerSide, "_evict_tainted", lambda _self, _settled: None


@named_patch(SCHEDULER_PATCHES, "load-job-not-sent")
def load_job_not_sent() -> Iterator[Swap]:
    """A step without tokens goes to the ranks without the jobs that were emitted for it."""
    build = SchedulerSide.build_step

    def build_step(self: SchedulerSide, output: Any) -> Any:
        step = build(self, output)
        return step if output.num_scheduled_tokens else dataclasses.replace(step, jobs=())

    yield SchedulerSide, "build_step", build_step


@named_patch(SCHEDULER_PATCHES, "hit-offered-again")
def hit_offered_again() -> Iterator[Swap]:
    """A load that failed is offered again to the same request."""
    yield Ledger, "may_hit", lambda _self, _request_id: True


@named_patch(SCHEDULER_PATCHES, "reset-keeps-keys")
def reset_keeps_keys() -> Iterator[Swap]:
    """After a reset with new weights the keys are the same, and so are the objects."""
    reset = Ledger.reset
    yield Ledger, "reset", lambda self, _epoch, **how: reset(self, self._epoch, **how)


@named_patch(SCHEDULER_PATCHES, "stores-after-refused-reset")
def stores_after_refused_reset() -> Iterator[Swap]:
    """After a reset that core refuses a new epoch is drawn, and what core has kept is stored under it."""
    reset = Ledger.reset
    yield Ledger, "reset", lambda self, epoch, **_how: reset(self, epoch)


@named_patch(SCHEDULER_PATCHES, "failed-block-believed-stored")
def failed_block_believed_stored() -> Iterator[Swap]:
    """Every block of a store that is over counts as stored."""
    settled = Ledger._store_settled

    def store_settled(self: Ledger, entry: OpenJob, current: Tracker | None, now: float) -> None:
        settled(self, entry, current, now)
        if entry.job.epoch == self._epoch:
            self._known.add(entry.job.hashes)

    yield Ledger, "_store_settled", store_settled


@named_patch(SCHEDULER_PATCHES, "miss-not-forgotten")
def miss_not_forgotten() -> Iterator[Swap]:
    """What counts as stored counts as stored for ever."""
    yield Ledger, "forget_known", lambda _self, _hashes: None


@named_patch(SCHEDULER_PATCHES, "failed-hit-outlives-request")
def failed_hit_outlives_request() -> Iterator[Swap]:
    """That a hit failed is remembered for the request id."""
    yield Ledger, "end_request", lambda _self, _request_id: None


# -- what the scheduler asks ------------------------------------------------


@named_patch(SCHEDULER_PATCHES, "quiesce-with-pins")
def quiesce_with_pins() -> Iterator[Swap]:
    """The connector says it has no push work while jobs are out."""
    yield SchedulerSide, "has_open_jobs", lambda _self: False


@named_patch(SCHEDULER_PATCHES, "push-work-for-ever")
def push_work_for_ever() -> Iterator[Swap]:
    """The connector always says it has push work."""
    yield SchedulerSide, "has_open_jobs", lambda _self: True


@named_patch(SCHEDULER_PATCHES, "waits-for-nothing")
def waits_for_nothing() -> Iterator[Swap]:
    """has_pending_block_frees is true though no report can free a block: core neither preempts nor proceeds."""
    yield SchedulerSide, "has_pending_block_frees", lambda _self: True


# -- two steps in flight ----------------------------------------------------


@named_patch(SCHEDULER_PATCHES, "load-under-running-step")
def load_under_running_step() -> Iterator[Swap]:
    """A producer loads under asynchronous scheduling, and no load waits for the steps before it: the target may be a
    block that one of them still writes. (Either guard alone is enough.)"""
    run = Transfer.run

    def unordered(self: Transfer, job: Job, fence: Fence) -> None:
        run(self, job, fence if job.kind is Kind.STORE else Fence(None))

    yield assembly, "may_load", lambda **_start: True
    yield Transfer, "run", unordered


@named_patch(SCHEDULER_PATCHES, "sync-load-under-next-step")
def sync_load_under_next_step() -> Iterator[Swap]:
    """Synchronous loads although the next step is scheduled before a failure is known."""
    yield assembly, "check_pipeline", lambda _settings, _steps_in_flight: None
