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


def reports_again() -> Swap:
    """Each report comes out a second time, with the next step."""
    take, said = RankSide.take_reports, WeakKeyDictionary[RankSide, list[Report]]()

    def take_reports(self: RankSide) -> list[Report]:
        last, said[self] = said.get(self, []), take(self)
        return [*said[self], *last]

    return RankSide, "take_reports", take_reports


@named_patch(RANK_PATCHES, "rank-reports-twice")
def rank_reports_twice() -> Iterator[Swap]:
    """A rank hands each report out with two steps."""
    yield reports_again()


@named_patch(RANK_PATCHES, "no-report-on-failure")
def no_report_on_failure() -> Iterator[Swap]:
    """A rank reports a store only when it succeeded."""
    finish = RankLedger.finish

    def finish_well(self: RankLedger, job_id: int, result: Result, bad: tuple[int, ...] = ()) -> bool:
        entry = self._jobs.get(job_id)
        if result is Result.DONE or entry is None or entry.job.kind is Kind.LOAD:
            return finish(self, job_id, result, bad)
        del self._jobs[job_id]
        self._retired[job_id] = None
        return True

    yield RankLedger, "finish", finish_well


@named_patch(RANK_PATCHES, "raise-before-try")
def raise_before_try() -> Iterator[Swap]:
    """An exception before the guarded part ends the job without a report."""
    run = Transfer.run

    def unguarded(self: Transfer, job: Job, fence: Any) -> None:
        try:
            self._client.exists(self._names(job, range(len(job.block_ids))))
        except RuntimeError:
            return
        run(self, job, fence)

    yield Transfer, "run", unguarded


# -- bytes ------------------------------------------------------------------


@named_patch(RANK_PATCHES, "release-on-timeout")
def release_on_timeout() -> Iterator[Swap]:
    """A transfer call that timed out is reported while its bytes may still move."""

    def quarantine(self: Desk, job_id: int, bad: tuple[int, ...]) -> bool:
        return self.finish(job_id, Result.INDETERMINATE, bad)

    yield Desk, "quarantine", quarantine


RANK_PATCHES["late-get-after-report"] = RANK_PATCHES["release-on-timeout"]


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

    def padded(operation: str, answer: Any, keys: int, *, highest: int | None = None) -> list[int]:
        del highest
        return [*(answer or ()), *[success[operation]] * keys][:keys]

    yield mooncake_client, "_one_per_key", padded
    yield transfer_module, "_whole", lambda a, _k: a


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
    """A failed load is only logged: nobody tells the scheduler."""
    collect = RankSide.collect

    def collect_good(self: RankSide) -> None:
        collect(self)
        if self._results.bad_blocks:
            self._results.finished_loads.clear()

    yield RankSide, "collect", collect_good


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
