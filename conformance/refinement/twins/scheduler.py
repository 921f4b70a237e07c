# ruff: noqa: SLF001 - reaches into kvledger's private names on purpose
"""Bugs of the scheduler side: whom a report counts for, what is pinned, what is stored, what core is told."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from conformance.refinement.twins.patching import Patch, Swap, named_patch
from conformance.refinement.twins.ranks import reports_again
from kvledger.protocol import Job, Kind, Ledger, Report
from kvledger.protocol.pins import PinTable
from kvledger.protocol.tracker import Load, Tracker
from kvledger.scheduler.admissions import Admissions
from kvledger.scheduler.side import SchedulerSide

SCHEDULER_PATCHES: dict[str, Patch] = {}


# -- references -------------------------------------------------------------


@named_patch(SCHEDULER_PATCHES, "no-pins")
def no_pins() -> Iterator[Swap]:
    """A store job holds no reference on the blocks it reads."""
    yield SchedulerSide, "_pin", lambda _self, _job: None
    yield SchedulerSide, "_release", lambda _self, _blocks: None


SCHEDULER_PATCHES["no-pins-poison"] = SCHEDULER_PATCHES["no-pins"]


@named_patch(SCHEDULER_PATCHES, "tail-not-pinned")
def tail_not_pinned() -> Iterator[Swap]:
    """The last block that a job reads is not among those that are pinned."""

    def pin(self: SchedulerSide, job: Job) -> None:
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids[:-1]])

    def release(self: SchedulerSide, block_ids: Any) -> None:
        self.pool.free_blocks([self.pool.blocks[b] for b in block_ids[1:]])

    yield SchedulerSide, "_pin", pin
    yield SchedulerSide, "_release", release


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


def _redirected(choose: Callable[[Ledger, Any, Report], Any]) -> Swap:
    """`apply_report` that credits a report to the job that `choose` names, and swallows what fits nowhere."""
    apply = Ledger.apply_report

    def apply_report(self: Ledger, report: Report, now: float) -> Any:
        entry = self._open.get(report.job_id)
        if entry is None:
            return None
        chosen = choose(self, entry, report)
        if chosen is None:
            return None
        size = len(chosen.job.block_ids)
        bad = tuple(p for p in report.bad if p < size) or ((0,) if report.bad else ())
        moved = Report(job_id=chosen.job.job_id, rank=report.rank, result=report.result, bad=bad)
        return apply(self, moved, now)

    return Ledger, "apply_report", apply_report


def _same_request(ledger: Ledger, entry: Any) -> list[Any]:
    return [
        e for _, e in sorted(ledger._open.items()) if e.request_id == entry.request_id and e.job.kind is entry.job.kind
    ]


@named_patch(SCHEDULER_PATCHES, "count-per-request")
def count_per_request() -> Iterator[Swap]:
    """Reports are counted per request id, so two jobs of it complete each other."""

    def choose(ledger: Ledger, entry: Any, report: Report) -> Any:
        oldest = _same_request(ledger, entry)[0]
        if report.rank not in oldest.waiting:
            oldest.waiting.pop()
            oldest.waiting.add(report.rank)
        return oldest

    yield _redirected(choose)


@named_patch(SCHEDULER_PATCHES, "late-report-to-new-job")
def late_report_to_new_job() -> Iterator[Swap]:
    """A late report of an older generation counts for the id's latest job; the older job never completes."""

    def choose(ledger: Ledger, entry: Any, report: Report) -> Any:
        latest = _same_request(ledger, entry)[-1]
        return latest if report.rank in latest.waiting else None

    yield _redirected(choose)


@named_patch(SCHEDULER_PATCHES, "release-at-first-rank")
def release_at_first_rank() -> Iterator[Swap]:
    """Pins are released when the first rank has reported."""

    def choose(_ledger: Ledger, entry: Any, report: Report) -> Any:
        entry.waiting = {report.rank}
        return entry

    yield _redirected(choose)


@named_patch(SCHEDULER_PATCHES, "report-counted-twice")
def report_counted_twice() -> Iterator[Swap]:
    """A report that comes a second time counts for a rank that has not reported."""

    def choose(_ledger: Ledger, entry: Any, report: Report) -> Any:
        if report.rank not in entry.waiting:
            entry.waiting.pop()
            entry.waiting.add(report.rank)
        return entry

    yield reports_again()
    yield _redirected(choose)


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
    """Blocks are stored while the synchronous load they rest on is pending, and after it has failed."""
    yield Tracker, "may_store", property(lambda _self: True)
    yield Ledger, "wants_store", lambda self, r, storable, _now: r in self._trackers and storable > 0


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
    yield Ledger, "reset", lambda self, _epoch: reset(self, self._epoch)


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
