# ruff: noqa: N802 - the properties' names are the model's
"""The model's properties, evaluated on kvledger's own objects: is this the state that must never be?

Each method of `BadState` tells what is wrong with the property whose name it has; one that yields nothing finds it kept.
Used where a counterexample has been replayed to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.world import State
from kvledger.protocol import Job, Kind, LedgerView, Load, OpenJobView

Wrong = Iterator[str]


@dataclass(frozen=True, slots=True)
class BadState:
    """`state` gives what is not kvledger's: which bytes move, what memory holds, what core thinks of its requests."""

    adapter: LedgerAdapter
    state: State

    @property
    def ledger(self) -> LedgerView:
        """The scheduler side's ledger in the model's words."""
        return self.adapter.view()

    def _open(self, kind: Kind) -> dict[int, OpenJobView]:
        return {j: entry for j, entry in self.ledger.led.items() if entry.job.kind is kind}

    def _requests(self, *statuses: str) -> list[str]:
        """Names of the requests that core has in one of these."""
        return [str(r) for r, status in enumerate(self.state["rst"], 1) if status in statuses]

    def _moving(self) -> Iterator[tuple[int, Job, int]]:
        """Rank (from 1), job and position in it of all bytes that move."""
        for k, j, i in sorted(self.state["dma"]):
            yield k, self.adapter.jobs[j], self.adapter.indices[j].index(i)

    def PinnedNotFreed(self) -> Wrong:
        """A block under a transfer is free, or means something else to somebody, or is to be computed."""
        for k, job, position in self._moving():
            block, under = job.block_ids[position], f"while job {job.job_id} moves its bytes on rank {k}"
            if self.adapter.pool.blocks[block].ref_cnt == 0:
                yield f"block {block} is free {under}"
            for name, table in self.adapter.tables.items():
                for at, held in enumerate(table):
                    if held == block and self._means_other(name, at, job, position):
                        yield f"block {block} belongs to request {name} {under}"

    def _means_other(self, name: str, at: int, job: Job, position: int) -> bool:
        if job.kind is Kind.LOAD and not job.sync:
            return name != job.reply_to
        if self.adapter.requests[name].block_hashes[at] != job.hashes[position]:
            return True
        tracker = self.ledger.trk.get(name)
        tainted = tracker is not None and tracker.load is Load.TAINTED  # computes in place, by finding F10 of the model
        return at >= self.state["full"][int(name) - 1] and not tainted

    def NotOverwritten(self) -> Wrong:
        """A forward that is still to run writes into a block that a transfer fills, or reads with other bytes."""
        for k, job, position in self._moving():
            block, under = job.block_ids[position], f"while job {job.job_id} moves its bytes on rank {k}"
            for step in self.state["pipe"][self.state["fwd"][k - 1] :]:
                for written, name in step["wr"]:
                    if written == block and (job.kind is Kind.LOAD or name != job.hashes[position].decode()):
                        yield f"a step in flight is to write into block {block} {under}"

    def NoPoison(self) -> Wrong:
        """Wrong bytes lie under a key."""
        for (k, name, epoch), content in self.adapter.objects.entries():
            if content != (name.decode(), self.adapter.epochs.index(epoch)):
                yield f"under {name.decode()} on rank {k} lies {content}"

    def ResetForgets(self) -> Wrong:
        """A lookup would find what was made with older weights."""
        now = self.state["epoch"]
        for (k, name, epoch), content in self.adapter.objects.entries():
            if epoch == self.ledger.epoch and content != (name.decode(), now):
                yield f"a lookup of {name.decode()} finds {content} on rank {k}, the weights are of epoch {now}"

    def NoWrongBytesUsed(self) -> Wrong:
        """A request counts a block as computed that does not hold its bytes."""
        unsettled = {b for step in self.state["pipe"] for b, _ in step["wr"]}
        unsettled.update(b for entry in self._open(Kind.LOAD).values() for b in entry.job.block_ids)
        for name, table in self.adapter.tables.items():
            for at, block in enumerate(table[: self.state["full"][int(name) - 1]]):
                right = (self.adapter.requests[name].block_hashes[at].decode(), self.state["epoch"])
                if block not in unsettled and any(memory[block - 1] != right for memory in self.state["mem"]):
                    yield f"request {name} goes on with block {block}, which does not hold the bytes of {right[0]}"

    def RefsExact(self) -> Wrong:
        """References are not owners plus open store jobs that read the block."""
        for block in self.adapter.pool.blocks[1:]:
            owners = sum(table.count(block.block_id) for table in self.adapter.tables.values())
            readers = sum(block.block_id in entry.job.block_ids for entry in self._open(Kind.STORE).values())
            if block.ref_cnt != owners + readers:
                yield f"block {block.block_id} has {block.ref_cnt} references, {owners} owners and {readers} readers"

    def _reported(self, k: int, j: int) -> bool:
        """Whether the rank's report of the job has reached the scheduler side."""
        said = self.adapter.said.get((k, j))
        return said is not None and all(said not in reports for _, reports in self.adapter.pipe)

    def _lost(self, k: int, j: int) -> bool:
        """Whether the rank took the job and will never report it."""
        rank = self.adapter.rank[k].view()
        through = j in rank.over and j not in rank.lives
        return through and (k, j) not in self.adapter.said and all(r.job_id != j for r in rank.ready)

    def _never_reported(self) -> Iterator[tuple[int, int]]:
        """Open jobs, each with a rank that has lost it."""
        for j, entry in self.ledger.led.items():
            yield from ((j, k) for k in range(self.adapter.ranks) if k not in entry.rep and self._lost(k, j))

    def ReportedOnce(self) -> Wrong:
        """A report is lost, or counts for another job than its own."""
        for j, entry in self.ledger.led.items():
            for k in range(self.adapter.ranks):
                if self._lost(k, j):
                    yield f"rank {k} is through with job {j} and has not reported it"
                if (k in entry.rep) != self._reported(k, j):
                    yield f"job {j}: rank {k} {'counts' if k in entry.rep else 'does not count'} as heard"

    def NoReportRefused(self) -> Wrong:
        """A report is on its way that the scheduler side must refuse."""
        seen: set[tuple[int, int]] = set()
        for report in (r for _, reports in self.adapter.pipe for r in reports):
            entry = self.ledger.led.get(report.job_id)
            if entry is None or report.rank in entry.rep or (report.rank, report.job_id) in seen:
                yield f"rank {report.rank} reports job {report.job_id} once too often"
            seen.add((report.rank, report.job_id))

    def BudgetKept(self) -> Wrong:
        """More blocks are pinned than allowed."""
        pinned, most = len(self.ledger.pins), self.adapter.bounds.max_pinned
        if pinned > most:
            yield f"{pinned} pinned blocks, {most} allowed"

    def NeverWaitsInVain(self) -> Wrong:
        """Core is told to wait although no report will free a block."""
        tables = {b for table in self.adapter.tables.values() for b in table}
        hanging = any(b.ref_cnt > 0 and b.block_id not in tables for b in self.adapter.pool.blocks)
        if self.adapter.side.has_pending_block_frees() and not hanging:
            yield "core waits for a block that no report gives back"

    def OldGenerationHarmless(self) -> Wrong:
        """A failure counts for a generation that has not issued the block itself."""
        indices = self.adapter.indices
        for name, tracker in self.ledger.trk.items():
            own = {i - 1 for j, job in self.adapter.jobs.items() if job.generation == tracker.gen for i in indices[j]}
            if not set(tracker.att) <= own:
                failed = sorted(tracker.att)
                yield f"a failure of blocks {failed} counts for request {name}, whose generation issued {sorted(own)}"

    def KnownIsStored(self) -> Wrong:
        """Something is believed to be stored that some rank's shard does not have."""
        for rank in range(self.adapter.ranks):
            for name in self.ledger.known:
                if self.adapter.objects.get(rank, name, self.ledger.epoch) is None:
                    yield f"{name.decode()} is believed to be stored, and rank {rank} has no such object"

    def FailedHitEnds(self) -> Wrong:
        """A failed hit is remembered for an id that no request has."""
        for name in self._requests("none", "zombie"):
            if name in self.ledger.nohit:
                yield f"that a hit of request {name} failed is remembered, and it is gone"

    def MissForgets(self) -> Wrong:
        """A request has just been admitted whose lookup missed a block that still counts as stored."""
        for request in self._requests("running", "loading"):
            for name in self.adapter.requests[request].block_hashes[:-1]:
                found = [self.adapter.objects.get(k, name, self.ledger.epoch) for k in range(self.adapter.ranks)]
                if None in found and name in self.ledger.known:
                    yield f"the lookup has missed {name.decode()}, and it still counts as stored"

    def JobsDelivered(self) -> Wrong:
        """An open job that a rank has not heard of, and that no step carries there."""
        on_their_way = {job.job_id for jobs, _ in self.adapter.pipe for job in jobs}
        for j in (j for j in self.ledger.led if j not in on_their_way):
            for k, row in enumerate(self.state["rk"]):
                if row[j - 1]["st"] == "none":
                    yield f"job {j} is open, and no step takes it to rank {k}"

    def RetryIssued(self) -> Wrong:
        """A tracker is to retry what lies beyond its frontier."""
        for name, tracker in self.ledger.trk.items():
            if any(i >= tracker.front for i in tracker.retry):
                yield f"request {name} is to retry {sorted(tracker.retry)}, its frontier is {tracker.front}"

    def TrackerCurrent(self) -> Wrong:
        """A running request has no tracker."""
        for r, status in enumerate(self.state["rst"], 1):
            if status in ("running", "loading") and str(r) not in self.ledger.trk:
                yield f"request {r} is {status} without a tracker"

    def LoadHasJob(self) -> Wrong:
        """A request waits for a load that nobody performs."""
        waited_for = {entry.req for entry in self._open(Kind.LOAD).values()}
        for name in self._requests("loading", "zombie"):
            if name not in waited_for:
                yield f"request {name} waits for a load, and no job loads for it"

    def DmaHasJob(self) -> Wrong:
        """Bytes move for a job that is over on its rank."""
        for k, j, _ in sorted(self.state["dma"]):
            if j not in self.adapter.rank[k - 1].view().lives:
                yield f"bytes of job {j} move on rank {k - 1}, which has reported it"

    def Refines(self) -> Wrong:
        """Bytes moved for a job that was over: what an earlier load returned is not what it returned any more."""
        for j in self.adapter.late:
            yield f"bytes of job {j} moved after it was reported"

    def FailedHitNotOffered(self) -> Wrong:
        """A load runs for a request whose load has failed before."""
        for entry in self._open(Kind.LOAD).values():
            if entry.req in self.ledger.nohit:
                yield f"request {entry.req} loads again although a load of it failed"

    def PinsReleased(self) -> Wrong:
        """Pins that no report will ever release."""
        stores, ended = self._open(Kind.STORE), all(s == "none" for s in self.state["rst"])
        for j, k in self._never_reported():
            if j in stores:
                yield f"job {j} keeps its pins for ever: rank {k} will not report it"
        if not self.adapter.side.has_open_jobs() and ended:
            yield from (f"job {j} keeps its pins for ever: core steps no more" for j in stores)

    def RequestsFinish(self) -> Wrong:
        """A request that cannot go on."""
        for name in self._requests("loading"):
            for j, _ in self._never_reported():
                yield f"request {name} waits for ever: job {j} will not be reported"
        free = sum(b.ref_cnt == 0 for b in self.adapter.pool.blocks[1:])
        for name in self._requests("waiting", "running")[:1]:
            if free < len(self.adapter.requests[name].block_hashes) and any(self.BudgetKept()):
                yield f"request {name} waits for ever: pins leave {free} blocks, and the store does not answer"

    def EngineIdles(self) -> Wrong:
        """Core steps on although nothing is left."""
        if self.adapter.side.has_open_jobs() and not self.ledger.led:
            yield "kvledger has push work, and no job is open"


CHECKS = {name for name in vars(BadState) if name[0].isupper()}
"""The properties that have a method."""


def wrong(adapter: LedgerAdapter, state: State, name: str) -> str:
    """What is wrong with property `name`, or nothing."""
    return next(getattr(BadState(adapter, state), name)(), "")
