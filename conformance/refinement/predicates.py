"""The second level, for kvledger only: its own state, read off its objects, must satisfy what the model proves.

The names are the model's (`spec/MooncakeStoreProps.tla`). Each predicate is evaluated after every action, on the
scheduler side's ledger and on vLLM's block pool, so a bug that costs only hits, or that two mistakes hide, shows too.
"""

from collections import Counter

from kvledger.protocol import LedgerView, Load
from kvledger_conformance.engine.engine import Engine
from kvledger_conformance.suite.properties import Violation


def breaches(engine: Engine) -> list[str]:
    """Names of the broken predicates, each with what is wrong. BudgetKept: pinned blocks stay within the budget."""
    view = engine.connector.scheduler_side.view().ledger
    ranks, most = frozenset(range(len(engine.ranks))), engine.connector.snapshot()["max_pinned"]
    found = [*_references(engine, view), *_jobs(view, ranks), *_trackers(engine, view)]
    if len(view.pins) > most:
        found.append(f"BudgetKept: {len(view.pins)} blocks are pinned, the budget is {most}")
    return found


def _references(engine: Engine, view: LedgerView) -> list[str]:
    """RefsExact: a block has exactly one reference per owner and one per store job that reads it."""
    owners: Counter[int] = Counter(block for table in engine.tables().values() for block in table)
    for _, blocks in getattr(engine.scheduler, "deferred_frees", ()):  # core gives these back when a step is over
        owners.update(block.block_id for block in blocks)
    wrong = [
        f"block {b.block_id}: {b.ref_cnt} references, {owners[b.block_id]} owners, {view.pins.get(b.block_id, 0)} pins"
        for b in engine.pool.blocks
        if not b.is_null and b.ref_cnt != owners[b.block_id] + view.pins.get(b.block_id, 0)
    ]
    return [f"RefsExact: {wrong[0]}"] if wrong else []


def _jobs(view: LedgerView, ranks: frozenset[int]) -> list[str]:
    """JobsOpen: an open job is awaited from at least one rank, and from known ranks only."""
    return [
        f"JobsOpen: job {job_id} has reports of ranks {sorted(entry.rep)}"
        for job_id, entry in view.led.items()
        if not entry.rep < ranks
    ]


def _trackers(engine: Engine, view: LedgerView) -> list[str]:
    """TrackerCurrent: a request that core runs has a tracker, and no other id has one. RetryIssued: only blocks below the
    frontier are retried. LoadHasJob: a pending load has an open job, and core waits only for an open one."""
    out = []
    running = {r.request_id for r in engine.scheduler.running}
    missing, strange = running - set(view.trk), set(view.trk) - set(engine.scheduler.requests)
    if missing and not engine.reset_seen:
        out.append(f"TrackerCurrent: {sorted(missing)} run without a tracker")
    if strange:
        out.append(f"TrackerCurrent: {sorted(strange)} have a tracker and do not exist")
    for request_id, tracker in view.trk.items():
        if any(i >= tracker.front for i in tracker.retry):
            out.append(f"RetryIssued: {request_id} is to retry {sorted(tracker.retry)}, frontier {tracker.front}")
        if tracker.load is Load.PENDING and tracker.job not in view.led:
            out.append(f"LoadHasJob: {request_id} waits for job {tracker.job}, which is not open")
    for request_id, watch in engine.loads.items():
        tracker_of = view.trk.get(request_id)
        if watch.waiting and tracker_of is not None and tracker_of.job is None and not watch.request.is_finished():
            out.append(f"LoadHasJob: core waits for a load of {request_id} that was never issued")
    return out


def check(engine: Engine) -> None:
    """Raise the first breach as a violation of `refines-the-model`."""
    found = breaches(engine)
    if found:
        raise Violation("refines-the-model", found[0])
