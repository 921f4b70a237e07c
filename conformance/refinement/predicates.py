# ruff: noqa: SLF001 - reaches into kvledger's private names on purpose
"""The second level, for kvledger only: its own state, read off its objects, must satisfy what the model proves.

The names are the model's (`spec/MooncakeStoreProps.tla`). Each predicate is evaluated after every action, on the
scheduler side's ledger and on vLLM's block pool, so a bug that costs only hits, or that two mistakes hide, shows too.
"""

from typing import Any

from kvledger_conformance.engine.engine import Engine
from kvledger_conformance.suite.properties import Violation

PREDICATES = {
    "RefsExact": "a block has exactly one reference per owner and one per store job that reads it",
    "BudgetKept": "pinned blocks stay within the budget",
    "TrackerCurrent": "a request that core runs has a tracker, and no other id has one",
    "RetryIssued": "only blocks below the frontier are retried",
    "LoadHasJob": "a tracker whose load is pending has an open load job, and core waits only for an open one",
    "JobsOpen": "an open job is awaited from at least one rank, and from known ranks only",
}


def breaches(engine: Engine) -> list[str]:
    """Names of the broken predicates, each with what is wrong."""
    side = engine.connector.scheduler_side
    ledger = side._ledger
    found = [*_references(engine, ledger), *_jobs(ledger), *_trackers(engine, ledger)]
    if len(dict(ledger._pins.blocks())) > ledger._pins._max_blocks:
        found.append("BudgetKept: more blocks are pinned than the budget allows")
    return found


def _references(engine: Engine, ledger: Any) -> list[str]:
    owners: dict[int, int] = {}
    for table in engine.tables().values():
        for block in table:
            owners[block] = owners.get(block, 0) + 1
    for _, blocks in getattr(engine.scheduler, "deferred_frees", ()):  # core gives these back when a step is over
        for block in blocks:
            owners[block.block_id] = owners.get(block.block_id, 0) + 1
    pins = dict(ledger._pins.blocks())
    wrong = [
        f"block {b.block_id}: {b.ref_cnt} references, {owners.get(b.block_id, 0)} owners, {pins.get(b.block_id, 0)} pins"
        for b in engine.pool.blocks
        if not b.is_null and b.ref_cnt != owners.get(b.block_id, 0) + pins.get(b.block_id, 0)
    ]
    return [f"RefsExact: {wrong[0]}"] if wrong else []


def _jobs(ledger: Any) -> list[str]:
    out = []
    for job_id, entry in ledger._open.items():
        if not entry.waiting or not entry.waiting <= ledger._ranks:
            out.append(f"JobsOpen: job {job_id} waits for ranks {sorted(entry.waiting)}")
    return out


def _trackers(engine: Engine, ledger: Any) -> list[str]:
    out = []
    trackers = ledger._trackers
    running = {r.request_id for r in engine.scheduler.running}
    missing, strange = running - set(trackers), set(trackers) - set(engine.scheduler.requests)
    if missing and not engine.reset_seen:
        out.append(f"TrackerCurrent: {sorted(missing)} run without a tracker")
    if strange:
        out.append(f"TrackerCurrent: {sorted(strange)} have a tracker and do not exist")
    for request_id, tracker in trackers.items():
        if any(i >= tracker.frontier for i in tracker.retry):
            out.append(f"RetryIssued: {request_id} is to retry {sorted(tracker.retry)}, frontier {tracker.frontier}")
        if tracker.load.value == "pending" and tracker.load_job not in ledger._open:
            out.append(f"LoadHasJob: {request_id} waits for job {tracker.load_job}, which is not open")
    for request_id, watch in engine.loads.items():
        tracker = trackers.get(request_id)
        if watch.waiting and tracker is not None and tracker.load_job is None and not watch.request.is_finished():
            out.append(f"LoadHasJob: core waits for a load of {request_id} that was never issued")
    return out


def check(engine: Engine) -> None:
    """Raise the first breach as a violation of `refines-the-model`."""
    found = breaches(engine)
    if found:
        raise Violation("refines-the-model", found[0])
