"""The model's properties, evaluated on kvledger's own objects: is this the state that must never be?

Each function tells what is wrong, or nothing. `state` gives what is not kvledger's: which bytes move, what memory holds,
what core thinks of its requests. Used where a counterexample has been replayed to its end.
"""

from collections.abc import Callable

from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.world import State
from kvledger.protocol import Kind, Load

Bad = Callable[[LedgerAdapter, State], str]


def pinned_not_freed(adapter: LedgerAdapter, state: State) -> str:
    """A block under a transfer is free, or means something else to somebody, or is to be computed."""
    for k, j, i in sorted(state["dma"]):
        position = adapter.indices[j].index(i)
        block = adapter.jobs[j].block_ids[position]
        if adapter.pool.blocks[block].ref_cnt == 0:
            return f"block {block} is free while job {j} moves its bytes on rank {k}"
        for name, table in adapter.tables.items():
            for at, held in enumerate(table):
                if held == block and _means_other(adapter, state, name, at, j, position):
                    return f"block {block} belongs to request {name} while job {j} moves its bytes on rank {k}"
    return ""


def _means_other(adapter: LedgerAdapter, state: State, name: str, at: int, j: int, position: int) -> bool:
    job = adapter.jobs[j]
    if job.kind is Kind.LOAD and not job.sync:
        return name != job.reply_to
    if adapter.requests[name].block_hashes[at] != job.hashes[position]:
        return True
    tracker = adapter.view().trk.get(name)
    tainted = tracker is not None and tracker.load is Load.TAINTED  # computes in place, by finding F10 of the model
    return at >= state["full"][int(name) - 1] and not tainted


def not_overwritten(adapter: LedgerAdapter, state: State) -> str:
    """A forward that is still to run writes into a block that a transfer fills, or reads with other bytes."""
    for k, j, i in sorted(state["dma"]):
        job = adapter.jobs[j]
        position = adapter.indices[j].index(i)
        for slot, step in enumerate(state["pipe"], 1):
            same = (job.block_ids[position], job.hashes[position].decode())
            for written in step["wr"] if slot > state["fwd"][k - 1] else ():
                if written[0] == same[0] and (job.kind is Kind.LOAD or written != same):
                    return (
                        f"a step in flight is to write into block {same[0]} while job {j} moves its bytes on rank {k}"
                    )
    return ""


def no_poison(adapter: LedgerAdapter, _state: State) -> str:
    """Wrong bytes lie under a key."""
    for (k, name, epoch), content in adapter.objects.entries():
        if content != (name.decode(), adapter.epochs.index(epoch)):
            return f"under {name.decode()} on rank {k} lies {content}"
    return ""


def reset_forgets(adapter: LedgerAdapter, state: State) -> str:
    """A lookup would find what was made with older weights."""
    for (k, name, epoch), content in adapter.objects.entries():
        if epoch == adapter.ledger.epoch and content != (name.decode(), state["epoch"]):
            return f"a lookup of {name.decode()} finds {content} on rank {k}, the weights are of epoch {state['epoch']}"
    return ""


def no_wrong_bytes_used(adapter: LedgerAdapter, state: State) -> str:
    """A request counts a block as computed that does not hold its bytes."""
    unsettled = {b for step in state["pipe"] for b, _ in step["wr"]}
    for entry in adapter.view().led.values():
        if entry.job.kind is Kind.LOAD:
            unsettled.update(entry.job.block_ids)
    for name, table in adapter.tables.items():
        for at, block in enumerate(table[: state["full"][int(name) - 1]]):
            right = (adapter.requests[name].block_hashes[at].decode(), state["epoch"])
            if block not in unsettled and any(memory[block - 1] != right for memory in state["mem"]):
                return f"request {name} goes on with block {block}, which does not hold the bytes of {right[0]}"
    return ""


def refs_exact(adapter: LedgerAdapter, _state: State) -> str:
    """References are not owners plus open store jobs that read the block."""
    for block in adapter.pool.blocks[1:]:
        owners = sum(table.count(block.block_id) for table in adapter.tables.values())
        readers = sum(
            block.block_id in e.job.block_ids for e in adapter.view().led.values() if e.job.kind is Kind.STORE
        )
        if block.ref_cnt != owners + readers:
            return f"block {block.block_id} has {block.ref_cnt} references, {owners} owners and {readers} readers"
    return ""


def _reported(adapter: LedgerAdapter, k: int, j: int) -> bool:
    """Whether the rank's report of the job has reached the scheduler side."""
    said = adapter.said.get((k, j))
    return said is not None and all(said not in reports for _, reports in adapter.pipe)


def _lost(adapter: LedgerAdapter, k: int, j: int) -> bool:
    """Whether the rank took the job and will never report it."""
    rank = adapter.rank[k].view()
    through = j in rank.over and j not in rank.lives
    return through and (k, j) not in adapter.said and all(r.job_id != j for r in rank.ready)


def reported_once(adapter: LedgerAdapter, _state: State) -> str:
    """A report is lost, or counts for another job than its own."""
    for j, entry in adapter.view().led.items():
        for k in range(adapter.ranks):
            if _lost(adapter, k, j):
                return f"rank {k} is through with job {j} and has not reported it"
            if (k in entry.rep) != _reported(adapter, k, j):
                return f"job {j}: rank {k} {'counts' if k in entry.rep else 'does not count'} as heard"
    return ""


def no_report_refused(adapter: LedgerAdapter, _state: State) -> str:
    """A report is on its way that the scheduler side must refuse."""
    seen: set[tuple[int, int]] = set()
    for _, reports in adapter.pipe:
        for report in reports:
            entry = adapter.view().led.get(report.job_id)
            if entry is None or report.rank in entry.rep or (report.rank, report.job_id) in seen:
                return f"rank {report.rank} reports job {report.job_id} once too often"
            seen.add((report.rank, report.job_id))
    return ""


def budget_kept(adapter: LedgerAdapter, _state: State) -> str:
    """More blocks are pinned than allowed."""
    pinned = len(adapter.view().pins)
    return f"{pinned} pinned blocks, {adapter.bounds.max_pinned} allowed" if pinned > adapter.bounds.max_pinned else ""


def never_waits_in_vain(adapter: LedgerAdapter, _state: State) -> str:
    """Core is told to wait although no report will free a block."""
    tables = {b for table in adapter.tables.values() for b in table}
    hanging = any(b.ref_cnt > 0 and b.block_id not in tables for b in adapter.pool.blocks)
    return (
        "core waits for a block that no report gives back"
        if adapter.side.has_pending_block_frees() and not hanging
        else ""
    )


def old_generation_harmless(adapter: LedgerAdapter, _state: State) -> str:
    """A failure counts for a generation that has not issued the block itself."""
    for name, tracker in adapter.view().trk.items():
        own = {i - 1 for j, job in adapter.jobs.items() if job.generation == tracker.gen for i in adapter.indices[j]}
        if not set(tracker.att) <= own:
            failed = sorted(tracker.att)
            return f"a failure of blocks {failed} counts for request {name}, whose generation issued {sorted(own)}"
    return ""


def known_is_stored(adapter: LedgerAdapter, state: State) -> str:
    """Something is believed to be stored that some rank's shard does not have."""
    stored = {(rank, name) for (rank, name, epoch), _ in adapter.objects.entries() if epoch == adapter.ledger.epoch}
    for rank in range(len(state["mem"])):
        for name in adapter.view().known:
            if (rank, name) not in stored:
                return f"{name.decode()} is believed to be stored, and rank {rank} has no such object"
    return ""


def failed_hit_ends(adapter: LedgerAdapter, state: State) -> str:
    """A failed hit is remembered for an id that no request has."""
    for r, status in enumerate(state["rst"], 1):
        if status in ("none", "zombie") and str(r) in adapter.view().nohit:
            return f"that a hit of request {r} failed is remembered, and it is gone"
    return ""


def miss_forgets(adapter: LedgerAdapter, state: State) -> str:
    """A request has just been admitted whose lookup missed a block that still counts as stored."""
    for r, status in enumerate(state["rst"]):
        if status in ("running", "loading"):
            for name in adapter.requests[str(r + 1)].block_hashes[:-1]:
                found = [adapter.objects.get(k, name, adapter.ledger.epoch) for k in range(len(state["mem"]))]
                if None in found and name in adapter.view().known:
                    return f"the lookup has missed {name.decode()}, and it still counts as stored"
    return ""


def jobs_delivered(adapter: LedgerAdapter, state: State) -> str:
    """An open job that a rank has not heard of, and that no step carries there."""
    on_their_way = {job.job_id for jobs, _ in adapter.pipe for job in jobs}
    for j in adapter.view().led:
        for k, row in enumerate(state["rk"]):
            if row[j - 1]["st"] == "none" and j not in on_their_way:
                return f"job {j} is open, and no step takes it to rank {k}"
    return ""


def retry_issued(adapter: LedgerAdapter, _state: State) -> str:
    """A tracker is to retry what lies beyond its frontier."""
    for name, tracker in adapter.view().trk.items():
        if any(i >= tracker.front for i in tracker.retry):
            return f"request {name} is to retry {sorted(tracker.retry)}, its frontier is {tracker.front}"
    return ""


def tracker_current(adapter: LedgerAdapter, state: State) -> str:
    """A running request has no tracker."""
    for r, status in enumerate(state["rst"], 1):
        if status in ("running", "loading") and str(r) not in adapter.view().trk:
            return f"request {r} is {status} without a tracker"
    return ""


def load_has_job(adapter: LedgerAdapter, state: State) -> str:
    """A request waits for a load that nobody performs."""
    waited_for = {e.req for e in adapter.view().led.values() if e.job.kind is Kind.LOAD}
    for r, status in enumerate(state["rst"], 1):
        if status in ("loading", "zombie") and str(r) not in waited_for:
            return f"request {r} waits for a load, and no job loads for it"
    return ""


def dma_has_job(adapter: LedgerAdapter, state: State) -> str:
    """Bytes move for a job that is over on its rank."""
    for k, j, _ in sorted(state["dma"]):
        if j not in adapter.rank[k - 1].view().lives:
            return f"bytes of job {j} move on rank {k - 1}, which has reported it"
    return ""


def late_bytes(adapter: LedgerAdapter, _state: State) -> str:
    """Bytes moved for a job that was over: what an earlier load returned is not what it returned any more."""
    return f"bytes of job {adapter.late[0]} moved after it was reported" if adapter.late else ""


def failed_hit_not_offered(adapter: LedgerAdapter, _state: State) -> str:
    """A load runs for a request whose load has failed before."""
    again = [e.req for e in adapter.view().led.values() if e.job.kind is Kind.LOAD]
    wrong = [name for name in again if name in adapter.view().nohit]
    return f"request {wrong[0]} loads again although a load of it failed" if wrong else ""


def pins_released(adapter: LedgerAdapter, state: State) -> str:
    """Pins that no report will ever release."""
    for j, entry in adapter.view().led.items():
        if entry.job.kind is Kind.STORE:
            for k in range(adapter.ranks):
                if k not in entry.rep and _lost(adapter, k, j):
                    return f"job {j} keeps its pins for ever: rank {k} will not report it"
            if not adapter.side.has_open_jobs() and all(s == "none" for s in state["rst"]):
                return f"job {j} keeps its pins for ever: core steps no more"
    return ""


def requests_finish(adapter: LedgerAdapter, state: State) -> str:
    """A request that cannot go on."""
    ranks = range(adapter.ranks)
    lost = [j for j, e in adapter.view().led.items() for k in ranks if k not in e.rep and _lost(adapter, k, j)]
    waiting = [r for r, status in enumerate(state["rst"], 1) if status == "loading"]
    if lost and waiting:
        return f"request {waiting[0]} waits for ever: job {lost[0]} will not be reported"
    stuck = [r for r, status in enumerate(state["rst"], 1) if status in ("waiting", "running")]
    free = sum(b.ref_cnt == 0 for b in adapter.pool.blocks[1:])
    if stuck and free < len(state["rp"][stuck[0] - 1]) and budget_kept(adapter, state):
        return f"request {stuck[0]} waits for ever: pins leave {free} blocks, and the store does not answer"
    return ""


def engine_idles(adapter: LedgerAdapter, _state: State) -> str:
    """Core steps on although nothing is left."""
    return (
        "kvledger has push work, and no job is open" if adapter.side.has_open_jobs() and not adapter.view().led else ""
    )


CHECKS: dict[str, Bad] = {
    "PinnedNotFreed": pinned_not_freed,
    "NotOverwritten": not_overwritten,
    "NoPoison": no_poison,
    "NoWrongBytesUsed": no_wrong_bytes_used,
    "RefsExact": refs_exact,
    "ReportedOnce": reported_once,
    "NoReportRefused": no_report_refused,
    "BudgetKept": budget_kept,
    "NeverWaitsInVain": never_waits_in_vain,
    "OldGenerationHarmless": old_generation_harmless,
    "ResetForgets": reset_forgets,
    "FailedHitNotOffered": failed_hit_not_offered,
    "TrackerCurrent": tracker_current,
    "LoadHasJob": load_has_job,
    "RetryIssued": retry_issued,
    "FailedHitEnds": failed_hit_ends,
    "MissForgets": miss_forgets,
    "JobsDelivered": jobs_delivered,
    "KnownIsStored": known_is_stored,
    "DmaHasJob": dma_has_job,
    "PinsReleased": pins_released,
    "RequestsFinish": requests_finish,
    "EngineIdles": engine_idles,
    "Refines": late_bytes,
}


def wrong(adapter: LedgerAdapter, state: State, name: str) -> str:
    """What is wrong with property `name`, or nothing."""
    return CHECKS[name](adapter, state)
