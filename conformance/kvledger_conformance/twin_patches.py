# ruff: noqa: SLF001 - reaches into kvledger's private names on purpose
"""The patches behind `twins`: each puts one bug into kvledger for the length of a block.

They reach into kvledger's private names on purpose, and fail loudly when a name is gone.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from kvledger.mooncake import client as mooncake_client
from kvledger.protocol import Job, Kind, Ledger, RankLedger, Report, Result
from kvledger.protocol.pins import PinTable
from kvledger.protocol.tracker import Load, Tracker
from kvledger.scheduler.admissions import Admissions
from kvledger.scheduler.side import SchedulerSide
from kvledger.worker import transfer as transfer_module
from kvledger.worker.desk import Desk
from kvledger.worker.rank_side import RankSide
from kvledger.worker.staging import StagingArea
from kvledger.worker.transfer import Transfer

Patch = Callable[[], AbstractContextManager[Any]]
PATCHES: dict[str, Patch] = {}


def named_patch(table: dict[str, Patch], name: str) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Notes a generator that patches for the length of a block under a name."""

    def note(function: Callable[[], Iterator[None]]) -> Patch:
        patch = contextlib.contextmanager(function)
        table[name] = patch
        return patch

    return note


def _patch(name: str) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    return named_patch(PATCHES, name)


def swap(owner: Any, name: str, new: Any) -> Any:
    """Another value for a name that exists, for the length of a block."""
    return mock.patch.object(owner, name, new)


_swap = swap


# -- references ------------------------------------------------------------


@_patch("no-pins")
def no_pins() -> Iterator[None]:
    """A store job holds no reference on the blocks it reads."""
    with (
        _swap(SchedulerSide, "_pin", lambda _self, _job: None),
        _swap(SchedulerSide, "_release", lambda _self, _blocks: None),
    ):
        yield


PATCHES["no-pins-poison"] = PATCHES["no-pins"]


@_patch("tail-not-pinned")
def tail_not_pinned() -> Iterator[None]:
    """The last block that a job reads is not among those that are pinned."""

    def pin(self: SchedulerSide, job: Job) -> None:
        self.pool.touch([self.pool.blocks[b] for b in job.block_ids[:-1]])

    def release(self: SchedulerSide, block_ids: Any) -> None:
        self.pool.free_blocks([self.pool.blocks[b] for b in block_ids[1:]])

    with _swap(SchedulerSide, "_pin", pin), _swap(SchedulerSide, "_release", release):
        yield


@_patch("release-on-success-only")
def release_on_success_only() -> Iterator[None]:
    """References go back only for a job without a failed block."""
    settle = SchedulerSide._settle

    def settled(self: SchedulerSide, outcome: Any) -> None:
        if not outcome.bad or outcome.job.kind is Kind.LOAD:
            settle(self, outcome)

    with _swap(SchedulerSide, "_settle", settled):
        yield


@_patch("unbounded-pins")
def unbounded_pins() -> Iterator[None]:
    """No budget: when the store stops answering, pins keep the pool from every request."""
    make = PinTable.__init__

    def init(self: PinTable, max_blocks: int) -> None:
        make(self, max_blocks + 10_000)

    with _swap(PinTable, "__init__", init):
        yield


# -- reports ---------------------------------------------------------------


def _redirected(choose: Callable[[Ledger, Any, Report], Any]) -> Any:
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

    return _swap(Ledger, "apply_report", apply_report)


def _same_request(ledger: Ledger, entry: Any) -> list[Any]:
    return [
        e for _, e in sorted(ledger._open.items()) if e.request_id == entry.request_id and e.job.kind is entry.job.kind
    ]


@_patch("count-per-request")
def count_per_request() -> Iterator[None]:
    """Reports are counted per request id, so two jobs of it complete each other."""

    def choose(ledger: Ledger, entry: Any, report: Report) -> Any:
        oldest = _same_request(ledger, entry)[0]
        if report.rank not in oldest.waiting:
            oldest.waiting.pop()
            oldest.waiting.add(report.rank)
        return oldest

    with _redirected(choose):
        yield


@_patch("late-report-to-new-job")
def late_report_to_new_job() -> Iterator[None]:
    """A late report of an older generation counts for the id's latest job; the older job never completes."""

    def choose(ledger: Ledger, entry: Any, report: Report) -> Any:
        latest = _same_request(ledger, entry)[-1]
        return latest if report.rank in latest.waiting else None

    with _redirected(choose):
        yield


@_patch("release-at-first-rank")
def release_at_first_rank() -> Iterator[None]:
    """Pins are released when the first rank has reported."""

    def choose(_ledger: Ledger, entry: Any, report: Report) -> Any:
        entry.waiting = {report.rank}
        return entry

    with _redirected(choose):
        yield


def _reports_again() -> Any:
    take = RankSide.take_reports

    def take_reports(self: RankSide) -> list[Report]:
        last = getattr(self, "_said", [])
        self._said = take(self)  # type: ignore[attr-defined]
        return [*self._said, *last]  # type: ignore[attr-defined]

    return _swap(RankSide, "take_reports", take_reports)


@_patch("rank-reports-twice")
def rank_reports_twice() -> Iterator[None]:
    """A rank hands each report out with two steps."""
    with _reports_again():
        yield


@_patch("report-counted-twice")
def report_counted_twice() -> Iterator[None]:
    """A report that comes a second time counts for a rank that has not reported."""

    def choose(_ledger: Ledger, entry: Any, report: Report) -> Any:
        if report.rank not in entry.waiting:
            entry.waiting.pop()
            entry.waiting.add(report.rank)
        return entry

    with _reports_again(), _redirected(choose):
        yield


@_patch("no-report-on-failure")
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

    with _swap(RankLedger, "finish", finish_well):
        yield


@_patch("raise-before-try")
def raise_before_try() -> Iterator[None]:
    """An exception before the guarded part ends the job without a report."""
    run = Transfer.run

    def unguarded(self: Transfer, job: Job, fence: Any) -> None:
        try:
            self._client.exists(self._names(job, range(len(job.block_ids))))
        except RuntimeError:
            return
        run(self, job, fence)

    with _swap(Transfer, "run", unguarded):
        yield


@_patch("old-retry-in-new-table")
def old_retry_in_new_table() -> Iterator[None]:
    """Failed blocks of an older generation go to the tracker of the one that follows."""
    settled = Ledger._store_settled

    def store_settled(self: Ledger, entry: Any, current: Tracker | None, now: float) -> None:
        settled(self, entry, current or self._trackers.get(entry.request_id), now)

    with _swap(Ledger, "_store_settled", store_settled):
        yield


@_patch("resume-deletes-tracker")
def resume_deletes_tracker() -> Iterator[None]:
    """A request resumed in the step that lists it as preempted loses its new tracker, and its load."""

    def end(self: Admissions, request_id: str) -> bool:
        return self._current.pop(request_id, None) is not None

    emit = SchedulerSide._emit_loads

    def emit_loads(self: SchedulerSide, now: float) -> Any:
        self._accepted = [a for a in self._accepted if self._ledger.generation(a[0]) is not None]
        return emit(self, now)

    with _swap(Admissions, "end_if_preempted", end), _swap(SchedulerSide, "_emit_loads", emit_loads):
        yield


@_patch("quiesce-with-pins")
def quiesce_with_pins() -> Iterator[None]:
    """The connector says it has no push work while jobs are out."""
    with _swap(SchedulerSide, "has_open_jobs", lambda _self: False):
        yield


@_patch("push-work-for-ever")
def push_work_for_ever() -> Iterator[None]:
    """The connector always says it has push work."""
    with _swap(SchedulerSide, "has_open_jobs", lambda _self: True):
        yield


@_patch("waits-for-nothing")
def waits_for_nothing() -> Iterator[None]:
    """has_pending_block_frees is true though no report can free a block: core neither preempts nor proceeds."""
    with _swap(SchedulerSide, "has_pending_block_frees", lambda _self: True):
        yield


# -- bytes -----------------------------------------------------------------


@_patch("release-on-timeout")
def release_on_timeout() -> Iterator[None]:
    """A transfer call that timed out is reported while its bytes may still move."""

    def quarantine(self: Desk, job_id: int, bad: tuple[int, ...]) -> bool:
        return self.finish(job_id, Result.INDETERMINATE, bad)

    with _swap(Desk, "quarantine", quarantine):
        yield


PATCHES["late-get-after-report"] = PATCHES["release-on-timeout"]


@_patch("slot-not-quarantined")
def slot_not_quarantined() -> Iterator[None]:
    """A staging slot goes back although a late transfer may still touch it."""
    with _swap(StagingArea, "quarantine", lambda self, slot, _now: self._free.append(slot.index)):
        yield


@_patch("store-before-fence")
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

    with _swap(RankSide, "start_loads", start_all), _swap(RankSide, "bind", bind_and_start):
        yield


@_patch("store-partial-blocks")
def store_partial_blocks() -> Iterator[None]:
    """A block counts as full though part of it is not computed yet."""

    def storable(self: SchedulerSide, request: Any, num_scheduled: int) -> int:
        size = self._plan.block_size
        tokens = min(request.num_computed_tokens + num_scheduled, request.num_prompt_tokens)
        return min(-(-tokens // size), len(request.block_hashes))

    with _swap(SchedulerSide, "_storable", storable):
        yield


@_patch("store-on-failed-load")
def store_on_failed_load() -> Iterator[None]:
    """Blocks are stored while the synchronous load they rest on is pending, and after it has failed."""
    with (
        _swap(Tracker, "may_store", property(lambda _self: True)),
        _swap(Ledger, "wants_store", lambda self, r, storable, _now: r in self._trackers and storable > 0),
    ):
        yield


@_patch("store-on-shared-load")
def store_on_shared_load() -> Iterator[None]:
    """A second request shares the target of a pending synchronous load, stores it and what it computes on it."""
    with _swap(Ledger, "_note_sync_loads", lambda _self, _tracker, _blocks: None):
        yield


@_patch("sync-load-goes-on")
def sync_load_goes_on() -> Iterator[None]:
    """A step goes on while its synchronous load is out; the bad blocks are told a step later."""
    collect = RankSide.take_bad_blocks

    def later(self: RankSide) -> set[int]:
        told = getattr(self, "_told_later", set())
        self._told_later = collect(self)  # type: ignore[attr-defined]
        return told

    with _swap(RankSide, "take_bad_blocks", later):
        yield


@_patch("unloaded-reported-good")
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

    with _swap(Transfer, "_load", load):
        yield


@_patch("lost-load-completion")
def lost_load_completion() -> Iterator[None]:
    """A failed load is only logged: nobody tells the scheduler."""
    collect = RankSide.collect

    def collect_good(self: RankSide) -> None:
        collect(self)
        if self._results.bad_blocks:
            self._results.finished_loads.clear()

    with _swap(RankSide, "collect", collect_good):
        yield


@_patch("failed-load-of-one-rank-lost")
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

    with _swap(Ledger, "apply_report", apply_report), _swap(RankSide, "take_bad_blocks", but_the_first):
        yield


@_patch("failed-sync-load-not-tainted")
def failed_sync_load_not_tainted() -> Iterator[None]:
    """Requests that rest on a failed synchronous load may store again once they are truncated."""
    move = Tracker.move_load

    def trusted(self: Tracker, action: str) -> None:
        if action == "Taint":
            self.load = Load.FAILED
        else:
            move(self, action)

    with _swap(Tracker, "move_load", trusted):
        yield


@_patch("hit-offered-again")
def hit_offered_again() -> Iterator[None]:
    """A load that failed is offered again to the same request."""
    with _swap(SchedulerSide, "_may_load", lambda _self, _request: True):
        yield


@_patch("abort-frees-target")
def abort_frees_target() -> Iterator[None]:
    """An aborted request's load is reported at once, though its bytes may still arrive."""
    cancel = RankLedger.cancel

    def cancel_running(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is not None and entry.life.value == "running":
            entry.guarded = False
            return self.give_up(job_id)
        return cancel(self, job_id)

    with _swap(RankLedger, "cancel", cancel_running):
        yield


@_patch("aborted-load-never-freed")
def aborted_load_never_freed() -> Iterator[None]:
    """A queued load whose request was aborted is dropped without a report."""

    def forget(self: RankLedger, job_id: int) -> bool:
        entry = self._jobs.get(job_id)
        if entry is None or entry.life.value != "queued":
            return False
        del self._jobs[job_id]
        return True

    with _swap(RankLedger, "cancel", forget):
        yield


@_patch("reset-keeps-keys")
def reset_keeps_keys() -> Iterator[None]:
    """After a reset with new weights the keys are the same, and so are the objects."""
    reset = Ledger.reset
    with _swap(Ledger, "reset", lambda self, _epoch: reset(self, self._epoch)):
        yield


@_patch("short-list-believed")
def short_list_believed() -> Iterator[None]:
    """A result list that is too short counts as success for the entries that are missing."""

    success = {"exists": 1, "put": 0, "get": 64}

    def padded(operation: str, answer: Any, keys: int, *, highest: int | None = None) -> list[int]:
        del highest
        return [*(answer or ()), *[success[operation]] * keys][:keys]

    with _swap(mooncake_client, "_one_per_key", padded), _swap(transfer_module, "_whole", lambda a, _k: a):
        yield


@_patch("publish-after-failed-forward")
def publish_after_failed_forward() -> Iterator[None]:
    """The saves of a step whose forward raised are submitted all the same."""
    submit = RankSide.submit_stores
    with _swap(RankSide, "submit_stores", lambda self, **_kwargs: submit(self, forward_failed=False)):
        yield


@_patch("bad-blocks-stay-cached")
def bad_blocks_stay_cached() -> Iterator[None]:
    """Blocks of a failed synchronous load stay in the prefix cache, for the next request to hit."""
    with _swap(SchedulerSide, "_evict_tainted", lambda _self, _settled: None):
        yield
