"""The scheduler side's ledger: generations, open jobs, pins. It alone decides when a block may be released.

What may live here: the scheduler-side actions of the model, under their names. No clock (`now` is an argument), no
vLLM object (the adapter passes ids in and takes jobs and released blocks out).
Spec: `BeginGeneration`, `EndGeneration`, `EmitLoad`, `EmitStore`, `ApplyReport`, `Reset`. Variables: `led` and `job` are
`OpenJob` (settled ones are forgotten), `trk` is `Tracker`, `nohit` the failed hits, `known` is `KnownHashes`.
Invariants: job ids only grow; a job is settled exactly when every rank has reported once; its pins are released then
and only then; a result of an older generation changes no tracker.
"""

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvledger.errors import ProtocolError
from kvledger.protocol.breaker import Breaker
from kvledger.protocol.jobs import Job, Kind, Report, Result
from kvledger.protocol.known import KnownHashes
from kvledger.protocol.pins import PinSnapshot, PinTable
from kvledger.protocol.tracker import Load, Tracker
from kvledger.protocol.views import LedgerView, OpenJobView, TrackerView

RETIRED_REMEMBERED = 4096
KNOWN_HASHES = 1 << 17


class Decline(enum.Enum):
    """Why a block that could be stored was not issued now."""

    BUDGET = "budget"  # waits: too many blocks are pinned
    BACKOFF = "backoff"  # waits: the store is under pressure or failing
    KNOWN = "known"  # this process stored it already
    IN_FLIGHT = "in_flight"  # another open job stores the same hash
    LOAD_PENDING = "load_pending"  # waits: bytes that it rests on are still being loaded
    TAINTED = "tainted"  # rests on a failed synchronous load, or on bytes older than a reset
    MUTE = "mute"  # core refused a reset: its prefix cache may hold bytes of other weights
    ATTEMPTS = "attempts"  # given up after the configured number of attempts


@dataclass(slots=True)
class OpenJob:
    """A job that some rank has not reported. `indices[i]` is the request's block index of position i."""

    job: Job
    request_id: str
    indices: tuple[int, ...]
    waiting: set[int]
    result: Result = Result.DONE
    bad: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A job that every rank has reported: release `released` (tail first) in the block pool."""

    job: Job
    request_id: str
    result: Result
    bad: tuple[int, ...]
    released: tuple[int, ...]
    current: bool
    """Whether the job's generation is still the request's current one."""
    tainted: tuple[str, ...] = ()
    """Requests that computed on bytes of this synchronous load, which did not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Figures for gauges, tests and conformance."""

    pins: PinSnapshot
    open_jobs: int
    generations: int
    retries: int
    settled: dict[str, dict[str, int]]
    declined: dict[str, int]
    loads_in_flight: int


class Ledger:
    """Who owns what among requests, jobs and pins. One thread only (vLLM's EngineCore loop)."""

    def __init__(
        self,
        *,
        num_ranks: int,
        pins: PinTable,
        max_store_attempts: int,
        stall_timeout_s: float,
        retry_backoff_s: float,
        retry_backoff_max_s: float = 30.0,
    ) -> None:
        self._ranks = frozenset(range(num_ranks))
        self._max_store_attempts = max_store_attempts
        self._stall_timeout_s = stall_timeout_s
        self._retry_backoff_s = retry_backoff_s
        self._pins = pins
        self._pressure = Breaker(threshold=1, initial_s=retry_backoff_s, max_s=retry_backoff_max_s)
        self._known = KnownHashes(KNOWN_HASHES)
        self._failed_hits: set[str] = set()  # the model's nohit: requests whose load failed; offered no hit again
        self._trackers: dict[str, Tracker] = {}
        self._open: dict[int, OpenJob] = {}
        self._storing: set[bytes] = set()  # hashes that open store jobs write, each in one job only
        self._sync_targets: dict[int, int] = {}  # block id -> synchronous load job that still fills it
        self._retired: OrderedDict[int, None] = OrderedDict()
        self._next_job = 1
        self._next_generation = 1
        self._epoch = ""
        self._mute = False  # the model's mute: core has refused a reset since the last one that succeeded
        self._progress_at = 0.0
        self._settled: dict[Kind, Counter[Result]] = {k: Counter() for k in Kind}
        self._declined: Counter[Decline] = Counter()

    # -- generations -------------------------------------------------------

    def begin_generation(self, request_id: str) -> int:
        """`BeginGeneration`: a fresh tracker; an older one of the same id ends first."""
        self.end_generation(request_id)
        generation = self._next_generation
        self._next_generation += 1
        self._trackers[request_id] = Tracker(generation)
        return generation

    def end_generation(self, request_id: str) -> None:
        """`EndGeneration`: the tracker goes; its jobs stay open and keep their pins until every rank reported."""
        self._trackers.pop(request_id, None)

    def end_request(self, request_id: str) -> None:
        """The request is over (the model's `Gone`): its id is free, and a failed hit of the id is forgotten."""
        self._failed_hits.discard(request_id)

    def may_hit(self, request_id: str) -> bool:
        """Whether the request may be offered a hit (the model's `~nohit` and `~mute`): not after one of its loads failed,
        nor while core holds on to blocks of before a reset."""
        return not self._mute and request_id not in self._failed_hits

    def generation(self, request_id: str) -> int | None:
        """Number of the request's current generation, if it has one."""
        tracker = self._trackers.get(request_id)
        return None if tracker is None else tracker.generation

    def progress(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        """Frontier and block indices to retry of the request's current generation (0 and none without one)."""
        tracker = self._trackers.get(request_id)
        return (0, ()) if tracker is None else (tracker.frontier, tuple(sorted(tracker.retry)))

    def load_state(self, request_id: str) -> Load:
        """How the load of the request's current generation stands."""
        return self._tracker(request_id, "LoadState").load

    def _tracker(self, request_id: str, action: str) -> Tracker:
        tracker = self._trackers.get(request_id)
        if tracker is None:
            raise ProtocolError(f"request {request_id!r} has no current generation", action=action)
        return tracker

    # -- emitting jobs -----------------------------------------------------

    def emit_load(
        self, request_id: str, block_ids: Sequence[int], hashes: Sequence[bytes], *, sync: bool, now: float
    ) -> Job:
        """`EmitLoad`: a job on exactly the target blocks, which vLLM holds for the request meanwhile.

        Raises:
            ProtocolError: no current generation, or its load is already pending or loaded.
        """
        tracker = self._tracker(request_id, "EmitLoad")
        job = self._make_job(Kind.LOAD, tracker, block_ids, hashes, reply_to="" if sync else request_id, sync=sync)
        tracker.move_load("EmitLoad")
        tracker.load_job = job.job_id
        if sync:
            self._sync_targets.update(dict.fromkeys(job.block_ids, job.job_id))
        self._admit(job, request_id, (), now)
        return job

    def wants_store(self, request_id: str, storable: int, now: float) -> bool:
        """Whether `EmitStore` could have work: cheap, so that a decode step costs nothing.

        `storable` counts the request's leading blocks whose KV is complete after this step.
        """
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.load is Load.TAINTED or self._mute:
            return False
        if self._sync_targets:
            return True  # even without new blocks: note whom the loads concern
        if self._pins.is_full:
            return False
        return storable > tracker.frontier or any(t <= now for t in tracker.retry.values())

    def is_through(self, request_id: str, limit: int) -> bool:
        """Whether nothing is left to store of the request's first `limit` blocks, unless a job of it fails later."""
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.load is Load.TAINTED:
            return True
        return tracker.frontier >= limit and not tracker.retry and tracker.may_store

    def emit_store(
        self, request_id: str, storable: int, block_ids: Sequence[int], hashes: Sequence[bytes], *, now: float
    ) -> Job | None:
        """`EmitStore`: pin and issue what is complete, within the budget; None if nothing is to be issued now.

        `block_ids` is the request's block table, `hashes` one hash per complete block; both are only read here.

        Raises:
            ProtocolError: no current generation, or fewer blocks or hashes than `storable`.
        """
        tracker = self._tracker(request_id, "EmitStore")
        if storable > min(len(block_ids), len(hashes)):
            raise ProtocolError(
                f"{storable} storable blocks, but {len(block_ids)} in the table and {len(hashes)} hashes",
                action="EmitStore",
            )
        self._note_sync_loads(tracker, block_ids)
        if self._mute:
            self._declined[Decline.MUTE] += 1
            return None
        if not tracker.may_store:
            self._declined[Decline.TAINTED if tracker.load is Load.TAINTED else Decline.LOAD_PENDING] += 1
            return None
        candidates = self._candidates(tracker, storable, now)
        first = next((i for i in candidates if self._redundant(hashes[i]) is None), None)
        # asked only if there is a block to issue and room to pin it: a probe is not spent on nothing
        if first is not None and self._pins.fits(0, block_ids[first]) and not self._pressure.allow(now):
            self._declined[Decline.BACKOFF] += 1
            return None
        chosen = self._choose(tracker, candidates, block_ids, hashes, now)
        if not chosen:
            return None
        job = self._make_job(Kind.STORE, tracker, [block_ids[i] for i in chosen], [hashes[i] for i in chosen])
        self._pins.pin(job.job_id, job.block_ids)
        self._storing.update(job.hashes)
        self._admit(job, request_id, tuple(chosen), now)
        return job

    def _note_sync_loads(self, tracker: Tracker, block_ids: Sequence[int]) -> None:
        """Whoever shares a block that a synchronous load still fills computes on bytes not known to be right."""
        if self._sync_targets:
            loads = {self._sync_targets[b] for b in block_ids if b in self._sync_targets}
            tracker.waits_for.update(loads - {tracker.load_job})

    def _redundant(self, h: bytes) -> Decline | None:
        if h in self._known:
            return Decline.KNOWN
        return Decline.IN_FLIGHT if h in self._storing else None

    def _candidates(self, tracker: Tracker, storable: int, now: float) -> list[int]:
        """Indices to look at: due retries, then from the frontier on; `storable` can shrink below both (failed load)."""
        return [i for i in [*tracker.due(now), *range(tracker.frontier, storable)] if i < storable]

    def _choose(
        self,
        tracker: Tracker,
        candidates: Sequence[int],
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        now: float,
    ) -> list[int]:
        """Those of the candidates to issue now, in table order; advances the frontier."""
        chosen: list[int] = []
        for i in candidates:
            reason = self._redundant(hashes[i])
            if reason is None and not self._pins.fits(len(chosen), block_ids[i]):
                self._declined[Decline.BUDGET] += 1
                break
            tracker.retry.pop(i, None)
            tracker.frontier = max(tracker.frontier, i + 1)
            if reason is None:
                chosen.append(i)
                continue
            self._declined[reason] += 1
            if reason is Decline.IN_FLIGHT:
                tracker.retry[i] = now + self._retry_backoff_s  # the other job may fail: look again
        return sorted(chosen)

    def _make_job(
        self,
        kind: Kind,
        tracker: Tracker,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        *,
        reply_to: str = "",
        sync: bool = False,
    ) -> Job:
        """The next job. Its id is spent only when it is admitted, so that a refusal changes nothing."""
        return Job(
            job_id=self._next_job,
            kind=kind,
            generation=tracker.generation,
            block_ids=tuple(block_ids),
            hashes=tuple(hashes),
            epoch=self._epoch,
            reply_to=reply_to,
            sync=sync,
        )

    def _admit(self, job: Job, request_id: str, indices: tuple[int, ...], now: float) -> None:
        if job.kind is Kind.STORE and self._pins.snapshot().jobs == 1:
            self._progress_at = now  # the first pins of a busy period; later ones do not hide a stall
        self._next_job = job.job_id + 1
        self._open[job.job_id] = OpenJob(job, request_id, indices, set(self._ranks))

    # -- reports -----------------------------------------------------------

    def apply_report(self, report: Report, now: float) -> Settled | None:
        """`ApplyReport`: note one rank's report; the settled job once every rank has reported, else None.

        Ranks are a set, never a count: two reports of one rank (`ReplayReport`) must not stand for two ranks.

        Raises:
            ProtocolError: unknown or settled job, unknown rank, second report of a rank, or a position outside the
                job. Nothing has changed then.
        """
        entry = self._check(report)
        entry.waiting.discard(report.rank)
        entry.result = max(entry.result, report.result)
        entry.bad.update(report.bad)
        if entry.job.kind is Kind.STORE:
            self._progress_at = now
        return None if entry.waiting else self._settle(entry, now)

    def _check(self, report: Report) -> OpenJob:
        entry = self._open.get(report.job_id)

        def refuse(why: str) -> ProtocolError:
            return ProtocolError(why, job_id=report.job_id, rank=report.rank, action="ApplyReport")

        if report.rank not in self._ranks:
            raise refuse(f"report of an unknown rank (ranks are 0 to {len(self._ranks) - 1})")
        if entry is None:
            if report.job_id in self._retired:
                raise refuse("report for a job that every rank had already reported")
            raise refuse("report for a job that was never emitted, or long ago")
        if report.rank not in entry.waiting:
            raise refuse("second report of this rank for this job")
        size = len(entry.job.block_ids)
        if any(not 0 <= p < size for p in report.bad):
            raise refuse(f"bad positions {report.bad} outside the job's {size} blocks")
        if report.result is not Result.DONE and not report.bad:
            raise refuse(f"result {report.result.name} without a bad position")
        if report.result is Result.DONE and report.bad:
            raise refuse("result DONE with bad positions")
        return entry

    def _settle(self, entry: OpenJob, now: float) -> Settled:
        """The job is over: its pins are released, and what it means for its request is noted if that is still the same.

        The ABA race, which this prevents (vLLM #52360; models `no-pins`, `late-report-to-new-job`, `count-per-request`):
          1. Request "r" is scheduled; job 1 pins block 7 and is told to the ranks.
          2. The store is slow. "r" is preempted: core frees its blocks. Block 7 stays, for the pin is a reference.
          3. "r" is resumed, or another request comes under the same id: generation 2, with other blocks, and job 2.
          4. Rank 0 reports job 1. A ledger by request id would see "a store of r is done" and could take it for job 2's.
          5. It would release job 2's blocks, while ranks still read them.
          6. Core gives such a block to a request with other tokens, and the next forward writes there.
          7. The transfer of job 2 reads the new bytes, and stores them under the hash of the old ones.
          8. Everybody who hits that key from now on reads another request's KV. Nothing heals it.
        So a job is found by its id, which never comes again; its pins are its own; and its result reaches a tracker only
        if the generation is the one that emitted it. An older generation's result releases, and does nothing else.
        Dropping it altogether would be simpler and would leak: nobody else gives back what job 1 holds.
        """
        job = entry.job
        del self._open[job.job_id]
        self._retired[job.job_id] = None
        while len(self._retired) > RETIRED_REMEMBERED:
            self._retired.popitem(last=False)
        self._settled[job.kind][entry.result] += 1
        tracker = self._trackers.get(entry.request_id)
        current = tracker if tracker is not None and tracker.generation == job.generation else None
        released: tuple[int, ...] = ()
        tainted: tuple[str, ...] = ()
        if job.kind is Kind.STORE:
            released = self._pins.unpin(job.job_id)
            self._store_settled(entry, current, now)
        else:
            tainted = self._load_settled(entry, current)
            if entry.bad and current is not None:
                self._failed_hits.add(entry.request_id)
        return Settled(
            job=job,
            request_id=entry.request_id,
            result=entry.result,
            bad=tuple(sorted(entry.bad)),
            released=released,
            current=current is not None,
            tainted=tainted,
        )

    def _store_settled(self, entry: OpenJob, current: Tracker | None, now: float) -> None:
        job = entry.job
        self._storing.difference_update(job.hashes)
        if job.epoch == self._epoch:
            self._known.add(h for p, h in enumerate(job.hashes) if p not in entry.bad)
        if entry.result is Result.DONE:
            self._pressure.success()
        elif entry.result is not Result.DROPPED:
            self._pressure.failure(now)
        if current is not None:
            for p in entry.bad:
                self._retry_later(current, entry.indices[p], now)

    def _retry_later(self, tracker: Tracker, index: int, now: float) -> None:
        """`AfterReports`: the block is issued again while the generation owns it, a bounded number of times."""
        tracker.attempts[index] = tracker.attempts.get(index, 0) + 1
        if tracker.attempts[index] < self._max_store_attempts:
            tracker.retry[index] = now + self._retry_backoff_s
        else:
            self._declined[Decline.ATTEMPTS] += 1

    def _load_settled(self, entry: OpenJob, current: Tracker | None) -> tuple[str, ...]:
        """`LoadFinished`; the requests that rest on it although it failed (synchronous loads).

        vLLM indexes the targets of a synchronous load before they are filled, so others may share them in the same step
        and compute on them; tainting only the request that loads would let a sharer store what it computed on garbage.
        """
        job, ok = entry.job, not entry.bad
        if current is not None:
            current.move_load("Loaded" if ok else "Taint" if job.sync else "LoadFailed")
        if job.epoch == self._epoch:
            self._known.add(h for p, h in enumerate(job.hashes) if p not in entry.bad)
        if not job.sync:
            return ()
        self._sync_targets = {b: j for b, j in self._sync_targets.items() if j != job.job_id}
        sharers = {r: t for r, t in self._trackers.items() if job.job_id in t.waits_for}
        for tracker in sharers.values():
            tracker.waits_for.discard(job.job_id)
            if not ok:
                tracker.move_load("Taint")
        if ok:
            return ()
        return (*sharers, *([entry.request_id] if current is not None else []))

    # -- questions ---------------------------------------------------------

    def has_open_jobs(self) -> bool:
        """`HasPendingPushWork`: whether some rank still owes a report (vLLM hook `has_pending_push_work`)."""
        return bool(self._open)

    def has_pending_frees(self, ref_count: Callable[[int], int], now: float) -> bool:
        """`HasPendingBlockFrees`: whether reports still to come free a block (vLLM hook `has_pending_block_frees`).

        Only a block with no other reference counts: one that a request owns too is not freed by our report, and core
        would wait for nothing. False once nothing has been reported for `stall_timeout_s` (`StallTimeout`): then vLLM
        preempts as it would without us.
        `ref_count(block_id)` is the block pool's count.
        """
        if now - self._progress_at > self._stall_timeout_s:
            return False
        return any(ref_count(b) == ours for b, ours in self._pins.blocks())

    def open_load(self, request_id: str) -> int | None:
        """Job id of the load that the request's current generation still waits for, if any (to cancel it on abort)."""
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.load_job not in self._open:
            return None
        return tracker.load_job

    def proven(self, block_ids: Sequence[int]) -> int:
        """Leading blocks of a table that rest on no synchronous load some rank has yet to report."""
        if not self._sync_targets:
            return len(block_ids)
        return next((i for i, b in enumerate(block_ids) if b in self._sync_targets), len(block_ids))

    def loads_in_flight(self) -> int:
        """Open load jobs."""
        return sum(e.job.kind is Kind.LOAD for e in self._open.values())

    @property
    def epoch(self) -> str:
        """Key epoch that new jobs carry."""
        return self._epoch

    def forget_known(self, hashes: Sequence[bytes]) -> None:
        """`Relearned`: a lookup did not find these; store them again when they come by."""
        self._known.discard(hashes)

    @property
    def mute(self) -> bool:
        """Whether nothing is stored or hit: core has refused a reset since the last one that succeeded."""
        return self._mute

    def reset(self, epoch: str, *, refused: bool = False) -> set[str]:
        """`Reset`: nothing stored before is known or addressed any more; open jobs only release.

        Generations end, except those whose load is still in flight: they will rest on old bytes, so they stay and store
        nothing until they are admitted anew. Returns their request ids.

        `refused` (`ResetRefused`): core has kept its prefix cache, so any later generation may rest on old bytes without
        our knowing. A new epoch alone would let it store them under the new keys; so nothing is stored or hit until a
        reset succeeds.
        """
        self._mute = refused
        self._epoch = epoch
        self._known.clear()
        kept = {r: t for r, t in self._trackers.items() if t.load_job in self._open}
        for tracker in kept.values():
            tracker.move_load("Taint")
        self._trackers = kept
        return set(kept)

    def view(self) -> LedgerView:
        """The state in the model's words; a copy."""
        ranks, pins = self._ranks, self._pins
        return LedgerView(
            next_job=self._next_job,
            epoch=self._epoch,
            led={
                j: OpenJobView(
                    job=e.job, req=e.request_id, items=e.indices, held=pins.held(j), rep=ranks - e.waiting
                )
                for j, e in self._open.items()
            },
            trk={
                r: TrackerView(
                    gen=t.generation, front=t.frontier, retry=frozenset(t.retry), att=dict(t.attempts), load=t.load,
                    job=t.load_job,
                )
                for r, t in self._trackers.items()
            },
            pins=dict(pins.blocks()),
            known=frozenset(self._known),
            nohit=frozenset(self._failed_hits),
        )  # fmt: skip

    def snapshot(self) -> LedgerSnapshot:
        """Figures for gauges, tests and conformance."""
        return LedgerSnapshot(
            pins=self._pins.snapshot(),
            open_jobs=len(self._open),
            generations=len(self._trackers),
            retries=sum(len(t.retry) for t in self._trackers.values()),
            settled={k.value: {r.name.lower(): c[r] for r in Result} for k, c in self._settled.items()},
            declined={d.value: self._declined[d] for d in Decline},
            loads_in_flight=self.loads_in_flight(),
        )
