# ruff: noqa: SLF001 - reaches into kvledger's private names on purpose
"""The historic bugs once more, within reach of the ledger adapter: in `protocol/`, `scheduler/side.py` or the connector's choices.

Most are the patches of `twin_patches`. Those here differ because the twin there sits in the worker, or because it keeps
books that the model's wrong version does not keep.
"""

from collections.abc import Iterator
from typing import Any

from conformance.refinement.twins.patches import PATCHES
from conformance.refinement.twins.patching import Patch, Swap, named_patch
from kvledger.protocol import Job, Kind, Ledger, RankLedger, Report, Result
from kvledger.protocol.ledger import OpenJob
from kvledger.protocol.pins import PinTable
from kvledger.protocol.tracker import Load, Tracker
from kvledger.scheduler.side import SchedulerSide

LEDGER_PATCHES: dict[str, Patch] = {}
"""By mutant of the model."""


def _pins_only(part: slice) -> Iterator[Swap]:
    """References and pin table hold only a part of the blocks that a job reads."""
    pin = PinTable.pin

    def pin_part(self: PinTable, job_id: int, block_ids: tuple[int, ...]) -> None:
        pin(self, job_id, block_ids[part])

    def touch(self: SchedulerSide, job: Job) -> None:
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids[part]])

    yield PinTable, "pin", pin_part
    yield SchedulerSide, "_pin", touch


@named_patch(LEDGER_PATCHES, "no-pins")
def no_pins() -> Iterator[Swap]:
    """A store job holds no reference, and the ledger knows of none."""
    yield from _pins_only(slice(0, 0))


@named_patch(LEDGER_PATCHES, "tail-not-pinned")
def tail_not_pinned() -> Iterator[Swap]:
    """The last block of a job is not pinned."""
    yield from _pins_only(slice(0, -1))


@named_patch(LEDGER_PATCHES, "failed-block-believed-stored")
def failed_block_believed_stored() -> Iterator[Swap]:
    """Every block of a store that is over counts as stored."""
    settled = Ledger._store_settled

    def store_settled(self: Ledger, entry: OpenJob, current: Tracker | None, now: float) -> None:
        settled(self, entry, current, now)
        if entry.job.epoch == self._epoch:
            self._known.add(entry.job.hashes)

    yield Ledger, "_store_settled", store_settled


@named_patch(LEDGER_PATCHES, "miss-not-forgotten")
def miss_not_forgotten() -> Iterator[Swap]:
    """What counts as stored counts as stored for ever."""
    yield Ledger, "forget_known", lambda _self, _hashes: None


@named_patch(LEDGER_PATCHES, "failed-hit-outlives-request")
def failed_hit_outlives_request() -> Iterator[Swap]:
    """That a hit failed is remembered for the request id."""
    yield Ledger, "end_request", lambda _self, _request_id: None


@named_patch(LEDGER_PATCHES, "count-per-request")
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


@named_patch(LEDGER_PATCHES, "late-report-to-new-job")
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


@named_patch(LEDGER_PATCHES, "raise-before-try")
def raise_before_try() -> Iterator[Swap]:
    """A job whose start raises is gone from the rank, without a report."""
    start = RankLedger.start

    def start_and_lose(self: RankLedger, kind: Kind, now: float) -> Job | None:
        job = start(self, kind, now)
        if job is not None:
            del self._jobs[job.job_id]
            self._retired[job.job_id] = None
        return job

    yield RankLedger, "start", start_and_lose


@named_patch(LEDGER_PATCHES, "lost-load-completion")
def lost_load_completion() -> Iterator[Swap]:
    """A job that failed is not reported, store or load."""
    finish = RankLedger.finish

    def finish_well(self: RankLedger, job_id: int, result: Any, bad: tuple[int, ...] = ()) -> bool:
        if not bad:
            return finish(self, job_id, result, bad)
        del self._jobs[job_id]
        self._retired[job_id] = None
        return True

    yield RankLedger, "finish", finish_well


LEDGER_PATCHES["no-report-on-failure"] = LEDGER_PATCHES["lost-load-completion"]


@named_patch(LEDGER_PATCHES, "rank-reports-twice")
def rank_reports_twice() -> Iterator[Swap]:
    """Reports stay with the rank when they are handed out."""
    yield RankLedger, "take_reports", lambda self: list(self._reports)


@named_patch(LEDGER_PATCHES, "release-on-timeout")
def release_on_timeout() -> Iterator[Swap]:
    """A job counts as over as soon as its call gives up, whatever its bytes do."""
    expire = RankLedger.expire

    def expire_now(self: RankLedger, now: float) -> list[int]:
        for entry in self._jobs.values():
            entry.until = now
        return expire(self, now)

    yield RankLedger, "expire", expire_now


@named_patch(LEDGER_PATCHES, "store-on-failed-load")
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


@named_patch(LEDGER_PATCHES, "release-at-first-rank")
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


LEDGER_PATCHES |= {
    mutant: LEDGER_PATCHES[patch]
    for mutant, patch in {
        "no-pins-poison": "no-pins",
        "timeout-dma-without-job": "release-on-timeout",
        "late-get-after-report": "release-on-timeout",
        "late-get-against-the-map": "release-on-timeout",
        "late-get-on-one-rank": "release-on-timeout",
        "load-over-at-first-rank": "release-at-first-rank",
    }.items()
}
LEDGER_PATCHES |= {
    name: PATCHES[name]
    for name in (
        "release-on-success-only", "report-counted-twice", "store-on-shared-load", "old-retry-in-new-table",
        "resume-deletes-tracker", "load-under-running-step", "failed-load-of-one-rank-lost", "failed-sync-load-not-tainted",
        "load-job-not-sent", "hit-offered-again", "quiesce-with-pins", "push-work-for-ever", "waits-for-nothing",
        "reset-keeps-keys", "unbounded-pins",
    )
}  # fmt: skip
LEDGER_PATCHES |= {
    "store-drafts": PATCHES["store-partial-blocks"],
    "retry-of-nothing-issued": PATCHES["old-retry-in-new-table"],
    "resume-loses-load": PATCHES["resume-deletes-tracker"],
    "load-under-running-step-overwrites": PATCHES["load-under-running-step"],
    "reset-without-fence": PATCHES["reset-keeps-keys"],
    "budget-ignored": PATCHES["unbounded-pins"],
}

FENCE = "the compute fence is in the worker (worker/fence.py, rank_side.py); the ledgers are not asked when a transfer may begin"
WAITS = "the wait for a synchronous load is in the worker (worker/rank_side.py); the ledgers only learn how it ended"
INDUCTION = "module MCInd: one step from any state of the invariant, not a behaviour that begins at the start"
CORE = "the wrong version changes what core does with the blocks, and core's choices come from the counterexample"
OUT_OF_REACH = {
    "store-before-fence": FENCE,
    "wrong-bytes-against-the-map": FENCE,
    "sync-load-goes-on": WAITS,
    "sync-load-hits-freed-block": WAITS,
    "unloaded-reported-good": "which blocks a transfer proves is decided in worker/transfer.py; to the ledgers it is an input",
    "abort-frees-target": CORE,
    "aborted-load-never-freed": CORE,
    "makes-room-for-the-preempted": CORE,
    "ind-no-pins": INDUCTION,
    "ind-no-fence": INDUCTION,
    "ind-release-at-first-rank": INDUCTION,
    "ind-release-on-timeout": INDUCTION,
}
"""Mutants whose counterexample cannot be replayed at this level, and why."""
