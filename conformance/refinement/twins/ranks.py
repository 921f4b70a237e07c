"""Bugs of the ranks: when bytes move, what a rank reports, and what it makes of a transfer that went wrong."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from conformance.refinement.twins.patching import Patch, named_patch, swap
from kvledger.mooncake import client as mooncake_client
from kvledger.protocol import Job, Kind, Ledger, RankLedger, Report, Result
from kvledger.worker import transfer as transfer_module
from kvledger.worker.desk import Desk
from kvledger.worker.rank_side import RankSide
from kvledger.worker.staging import StagingArea
from kvledger.worker.transfer import Transfer

RANK_PATCHES: dict[str, Patch] = {}


# -- reports ----------------------------------------------------------------


def reports_again() -> Any:
    """Each report comes out a second time, with the next step."""
    take, said = RankSide.take_reports, WeakKeyDictionary[RankSide, list[Report]]()

    def take_reports(self: RankSide) -> list[Report]:
        last, said[self] = said.get(self, []), take(self)
        return [*said[self], *last]

    return swap(RankSide, "take_reports", take_reports)


@named_patch(RANK_PATCHES, "rank-reports-twice")
def rank_reports_twice() -> Iterator[None]:
    """A rank hands each report out with two steps."""
    with reports_again():
        yield


@named_patch(RANK_PATCHES, "no-report-on-failure")
def no_report_on_failure() -> Iterator[None]:
    """A rank reports a store only when it succeeded."""
    finish = RankLedger.finish

    def finish_well(self: RankLedger, job_id: int, result: Result, bad: tuple[int, ...] = ()) -> bool:
        entry = self._jobs.get(job_id)
        if result is Result.DONE or entry is None or entry.job.kind is Kind.LOAD:
            return finish(self, job_id, result, bad)
        del self._jobs[job_id]
        self._retired[job_id] = None
        return True

    with swap(RankLedger, "finish", finish_well):
        yield


@named_patch(RANK_PATCHES, "raise-before-try")
def raise_before_try() -> Iterator[None]:
    """An exception before the guarded part ends the job without a report."""
    run = Transfer.run

    def unguarded(self: Transfer, job: Job, fence: Any) -> None:
        try:
            self._client.exists(self._names(job, range(len(job.block_ids))))
        except RuntimeError:
            return
        run(self, job, fence)

    with swap(Transfer, "run", unguarded):
        yield


# -- bytes ------------------------------------------------------------------


@named_patch(RANK_PATCHES, "release-on-timeout")
def release_on_timeout() -> Iterator[None]:
    """A transfer call that timed out is reported while its bytes may still move."""

    def quarantine(self: Desk, job_id: int, bad: tuple[int, ...]) -> bool:
        return self.finish(job_id, Result.INDETERMINATE, bad)

    with swap(Desk, "quarantine", quarantine):
        yield


RANK_PATCHES["late-get-after-report"] = RANK_PATCHES["release-on-timeout"]


@named_patch(RANK_PATCHES, "slot-not-quarantined")
def slot_not_quarantined() -> Iterator[None]:
    """A staging slot goes back although a late transfer may still touch it."""
    with swap(StagingArea, "quarantine", lambda self, slot, _now: self.give_back(slot)):
        yield


@named_patch(RANK_PATCHES, "store-before-fence")
def store_before_fence() -> Iterator[None]:
    """The transfer thread does not wait for the forward that computes the block."""
    start = RankSide.start_loads

    def start_all(self: RankSide) -> None:
        start(self)
        self._accept(Kind.STORE)

    bind = RankSide.bind

    def bind_and_start(self: RankSide, plan: Any) -> None:
        bind(self, plan)
        self._accept(Kind.STORE)

    with swap(RankSide, "start_loads", start_all), swap(RankSide, "bind", bind_and_start):
        yield


@named_patch(RANK_PATCHES, "publish-after-failed-forward")
def publish_after_failed_forward() -> Iterator[None]:
    """The saves of a step whose forward raised are submitted all the same."""
    submit = RankSide.submit_stores
    with swap(RankSide, "submit_stores", lambda self, **_kwargs: submit(self, forward_failed=False)):
        yield


@named_patch(RANK_PATCHES, "short-list-believed")
def short_list_believed() -> Iterator[None]:
    """A result list that is too short counts as success for the entries that are missing."""

    success = {"exists": 1, "put": 0, "get": 64}

    def padded(operation: str, answer: Any, keys: int, *, highest: int | None = None) -> list[int]:
        del highest
        return [*(answer or ()), *[success[operation]] * keys][:keys]

    with swap(mooncake_client, "_one_per_key", padded), swap(transfer_module, "_whole", lambda a, _k: a):
        yield


# -- loads ------------------------------------------------------------------


@named_patch(RANK_PATCHES, "sync-load-goes-on")
def sync_load_goes_on() -> Iterator[None]:
    """A step goes on while its synchronous load is out; the bad blocks are told a step later."""
    collect, kept = RankSide.take_bad_blocks, WeakKeyDictionary[RankSide, set[int]]()

    def later(self: RankSide) -> set[int]:
        told, kept[self] = kept.get(self, set()), collect(self)
        return told

    with swap(RankSide, "take_bad_blocks", later):
        yield


@named_patch(RANK_PATCHES, "unloaded-reported-good")
def unloaded_reported_good() -> Iterator[None]:
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

    with swap(Transfer, "_load", load):
        yield


@named_patch(RANK_PATCHES, "lost-load-completion")
def lost_load_completion() -> Iterator[None]:
    """A failed load is only logged: nobody tells the scheduler."""
    collect = RankSide.collect

    def collect_good(self: RankSide) -> None:
        collect(self)
        if self._results.bad_blocks:
            self._results.finished_loads.clear()

    with swap(RankSide, "collect", collect_good):
        yield


@named_patch(RANK_PATCHES, "failed-load-of-one-rank-lost")
def failed_load_of_one_rank_lost() -> Iterator[None]:
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

    with swap(Ledger, "apply_report", apply_report), swap(RankSide, "take_bad_blocks", but_the_first):
        yield


@named_patch(RANK_PATCHES, "abort-frees-target")
def abort_frees_target() -> Iterator[None]:
    """An aborted request's load is reported at once, though its bytes may still arrive."""
    cancel = RankLedger.cancel

    def cancel_running(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is not None and entry.life.value == "running":
            entry.guarded = False
            return self.give_up(job_id)
        return cancel(self, job_id)

    with swap(RankLedger, "cancel", cancel_running):
        yield


@named_patch(RANK_PATCHES, "aborted-load-never-freed")
def aborted_load_never_freed() -> Iterator[None]:
    """A queued load whose request was aborted is dropped without a report."""

    def forget(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is None or entry.life.value != "queued":
            return False
        del self._jobs[job_id]
        return True

    with swap(RankLedger, "cancel", forget):
        yield
