"""Bugs of the ranks: when bytes move, what a rank reports, and what it makes of a transfer that went wrong."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from conformance.refinement.twins.patching import Patch, Swap, named_patch
from kvledger.mooncake import client as mooncake_client
from kvledger.protocol import Job, Kind, Ledger, RankLedger, Report, Result
from kvledger.worker import transfer as transfer_module
from kvledger.worker.desk import Desk
from kvledger.worker.rank_side import RankSide
from kvledger.worker.staging import StagingArea
from kvledger.worker.transfer import Transfer

RANK_PATCHES: dict[str, Patch] = {}


# -- reports ----------------------------------------------------------------


@named_patch(RANK_PATCHES, "rank-reports-twice")
def rank_reports_twice() -> Iterator[Swap]:
    """Reports stay with the rank when they are handed out."""
    yield RankLedger, "take_reports", lambda self: list(self._reports)


@named_patch(RANK_PATCHES, "raise-before-try")
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


# -- bytes ------------------------------------------------------------------


@named_patch(RANK_PATCHES, "release-on-timeout")
def release_on_timeout() -> Iterator[Swap]:
    """A transfer call that timed out is reported while its bytes may still move."""

    def quarantine(self: Desk, job_id: int, bad: tuple[int, ...]) -> bool:
        return self.finish(job_id, Result.INDETERMINATE, bad)

    yield Desk, "quarantine", quarantine


RANK_PATCHES["late-get-after-report"] = RANK_PATCHES["release-on-timeout"]


@named_patch(RANK_PATCHES, "over-when-the-call-gives-up")
def over_when_the_call_gives_up() -> Iterator[Swap]:
    """A job counts as over as soon as its call gives up, whatever its bytes do."""
    expire = RankLedger.expire

    def expire_now(self: RankLedger, now: float) -> list[int]:
        for entry in self._jobs.values():
            entry.until = now
        return expire(self, now)

    yield RankLedger, "expire", expire_now


@named_patch(RANK_PATCHES, "slot-not-quarantined")
def slot_not_quarantined() -> Iterator[Swap]:
    """A staging slot goes back although a late transfer may still touch it."""
    yield StagingArea, "quarantine", lambda self, slot, _now: self.give_back(slot)


@named_patch(RANK_PATCHES, "store-before-fence")
def store_before_fence() -> Iterator[Swap]:
    """The transfer thread does not wait for the forward that computes the block."""
    start = RankSide.start_loads

    def start_all(self: RankSide) -> None:
        start(self)
        self._accept(Kind.STORE)

    bind = RankSide.bind

    def bind_and_start(self: RankSide, plan: Any) -> None:
        bind(self, plan)
        self._accept(Kind.STORE)

    yield RankSide, "start_loads", start_all
    yield RankSide, "bind", bind_and_start


@named_patch(RANK_PATCHES, "publish-after-failed-forward")
def publish_after_failed_forward() -> Iterator[Swap]:
    """The saves of a step whose forward raised are submitted all the same."""
    submit = RankSide.submit_stores
    yield RankSide, "submit_stores", lambda self, **_kwargs: submit(self, forward_failed=False)


@named_patch(RANK_PATCHES, "short-list-believed")
def short_list_believed() -> Iterator[Swap]:
    """A result list that is too short counts as success for the entries that are missing."""

    success = {"exists": 1, "put": 0, "get": 64}

    def padded(faults: object, operation: str, answer: Any, keys: int, *, highest: int | None = None) -> list[int]:
        del faults, highest
        return [*(answer or ()), *[success[operation]] * keys][:keys]

    yield mooncake_client, "_one_per_key", padded


# -- loads ------------------------------------------------------------------


@named_patch(RANK_PATCHES, "sync-load-goes-on")
def sync_load_goes_on() -> Iterator[Swap]:
    """A step goes on while its synchronous load is out; the bad blocks are told a step later."""
    collect, kept = RankSide.take_bad_blocks, WeakKeyDictionary[RankSide, set[int]]()

    def later(self: RankSide) -> set[int]:
        told, kept[self] = kept.get(self, set()), collect(self)
        return told

    yield RankSide, "take_bad_blocks", later


@named_patch(RANK_PATCHES, "unloaded-reported-good")
def unloaded_reported_good() -> Iterator[Swap]:
    """A load starts at another block on each rank; of one that fails only the failed part is reported."""

    def load(self: Transfer, job: Job, outcome: Any) -> None:
        positions = list(range(len(job.block_ids)))
        turn = self._shard % len(positions)
        failed: set[int] = set()
        for batch in self._batches(job, positions[turn:] + positions[:turn], outcome):
            for position, code in zip(batch, self._get(job, batch, outcome), strict=True):
                outcome.note(position, transfer_module.classify_get(code, self._layout.object_bytes), code)
            failed = outcome.unproven & set(batch)
        outcome.unproven = failed

    yield Transfer, "_load", load


@named_patch(RANK_PATCHES, "lost-load-completion")
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


RANK_PATCHES["no-report-on-failure"] = RANK_PATCHES["lost-load-completion"]


@named_patch(RANK_PATCHES, "failed-load-of-one-rank-lost")
def failed_load_of_one_rank_lost() -> Iterator[Swap]:
    """Of several ranks' reports of a load only the last one's bad blocks count, on the way to core as in the ledger."""
    apply, collect = Ledger.apply_report, RankSide.take_bad_blocks

    def apply_report(self: Ledger, report: Report, now: float) -> Any:
        entry = self._open.get(report.job_id)
        if entry is not None:
            entry.bad.clear()
            entry.result = Result.DONE
        return apply(self, report, now)

    def but_the_first(self: RankSide) -> set[int]:
        told = collect(self)
        return told if self._rank else set()

    yield Ledger, "apply_report", apply_report
    yield RankSide, "take_bad_blocks", but_the_first


@named_patch(RANK_PATCHES, "abort-frees-target")
def abort_frees_target() -> Iterator[Swap]:
    """An aborted request's load is reported at once, though its bytes may still arrive."""
    cancel = RankLedger.cancel

    def cancel_running(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is not None and entry.life.value == "running":
            entry.guarded = False
            return self.give_up(job_id)
        return cancel(self, job_id)

    yield RankLedger, "cancel", cancel_running


@named_patch(RANK_PATCHES, "aborted-load-never-freed")
def aborted_load_never_freed() -> Iterator[Swap]:
    """A queued load whose request was aborted is dropped without a report."""

    def forget(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is None or entry.life.value != "queued":
            return False
        del self._jobs[job_id]
        return True

    yield RankLedger, "cancel", forget
