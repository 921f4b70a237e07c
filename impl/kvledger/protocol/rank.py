"""The rank's ledger: jobs in, exactly one report each out, whatever happens.

What may live here: the rank-side actions of the model, under their names. No clock, no thread (the worker side calls
under its own lock). Spec actions: `RankAccept`, `RankStart`, `RankFinish`, `RankQuarantine`, `RankDrop`,
`RankExpire`, `TakeReports`. Invariants: a job is reported once; a job that may still move bytes of KV blocks is not
reported before its bound; nothing here is kept by request.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvledger.errors import ProtocolError
from kvledger.protocol.jobs import RANK_LIFE, Job, Kind, Life, Report, Result
from kvledger.protocol.views import RankView

RETIRED_REMEMBERED = 4096


@dataclass(slots=True)
class RankJob:
    """A job on this rank. `until` bounds its running or quarantined life (s); `guarded` stages are never cut short."""

    job: Job
    life: Life = Life.QUEUED
    until: float = 0.0
    guarded: bool = False
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """Figures for gauges, tests and conformance."""

    queued: int
    running: int
    quarantined: int
    unread_reports: int


class RankLedger:
    """One rank's jobs. The caller serialises access."""

    def __init__(self, *, rank: int, stuck_after_s: float, quarantine_s: float) -> None:
        self._rank = rank
        self._stuck_after_s = stuck_after_s
        self._quarantine_s = quarantine_s
        self._jobs: dict[int, RankJob] = {}
        self._reports: list[Report] = []
        self._retired: OrderedDict[int, None] = OrderedDict()

    def accept(self, job: Job) -> None:
        """`RankAccept`: the job joins the FIFO.

        Raises:
            ProtocolError: this rank has seen the job before.
        """
        if job.job_id in self._jobs or job.job_id in self._retired:
            raise ProtocolError("job told twice", job_id=job.job_id, rank=self._rank, action="RankAccept")
        self._jobs[job.job_id] = RankJob(job)

    def start(self, kind: Kind, now: float) -> Job | None:
        """`RankStart`: the lowest queued job of this kind begins to run, or None."""
        queued = [j for j, e in self._jobs.items() if e.life is Life.QUEUED and e.job.kind is kind]
        if not queued:
            return None
        return self._start(min(queued), now)

    def start_job(self, job_id: int, now: float) -> bool:
        """`RankStart` of one given job; False if it is no longer queued (dropped or cancelled)."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.QUEUED:
            return False
        self._start(job_id, now)
        return True

    def _start(self, job_id: int, now: float) -> Job:
        entry = self._jobs[job_id]
        self._move(entry, "RankStart")
        entry.until = now + self._stuck_after_s
        return entry.job

    def proceed(self, job_id: int, now: float, *, guarded: bool = False) -> bool:
        """Ask before each stage of a running job; renews its bound. False: it was given up, touch nothing more.

        `guarded` stages write KV blocks from this process and end by themselves: such a job is not given up meanwhile.
        """
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.RUNNING:
            return False
        entry.until = now + self._stuck_after_s
        entry.guarded = guarded
        return True

    def finish(self, job_id: int, result: Result, bad: tuple[int, ...] = ()) -> bool:
        """`RankFinish`: the result is final. False if the job had been given up before (nothing happens then)."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.RUNNING:
            if job_id in self._retired:
                return False
            raise ProtocolError(
                "job does not run here, or ended long ago", job_id=job_id, rank=self._rank, action="RankFinish"
            )
        self._report(entry, "RankFinish", result, bad)
        return True

    def quarantine(self, job_id: int, bad: tuple[int, ...], now: float) -> bool:
        """`RankQuarantine`: the call gave up while bytes of KV blocks may move: no report before the bound."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.RUNNING:
            return False
        self._move(entry, "RankQuarantine")
        entry.until = now + self._quarantine_s
        entry.guarded = False  # the bound ends a quarantine, whatever stage came before
        entry.bad = bad
        return True

    def drop(self, job: Job) -> None:
        """`RankDrop`: the job is reported without having started (told but never submitted, cancelled, shutdown)."""
        if job.job_id not in self._jobs:
            self.accept(job)
        self._report(self._jobs[job.job_id], "RankDrop", Result.DROPPED, _all(job))

    def cancel(self, job_id: int) -> bool:
        """`RankDrop` for a job that is still queued; False if it runs or is over."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.QUEUED:
            return False
        self.drop(entry.job)
        return True

    def drop_queued(self, kind: Kind) -> int:
        """`RankDrop` for all jobs of a kind still queued (shutdown, or their lane is stuck); returns how many."""
        queued = [e.job for e in self._jobs.values() if e.life is Life.QUEUED and e.job.kind is kind]
        for job in queued:
            self.drop(job)
        return len(queued)

    def expire(self, now: float) -> list[int]:
        """`RankExpire`: quarantines that are over, and jobs whose call never came back, are reported."""
        over = [
            e
            for e in self._jobs.values()
            if e.life in (Life.RUNNING, Life.QUARANTINED) and not e.guarded and now >= e.until
        ]
        for entry in over:
            self._report(entry, "RankExpire", Result.INDETERMINATE, entry.bad or _all(entry.job))
        return [e.job.job_id for e in over]

    def give_up(self, job_id: int) -> bool:
        """`RankExpire` at once, for a synchronous load whose caller waits no longer; False if it is guarded or over."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.life is not Life.RUNNING or entry.guarded:
            return False
        self._report(entry, "RankExpire", Result.INDETERMINATE, _all(entry.job))
        return True

    def take_reports(self) -> list[Report]:
        """`TakeReports`: hands each report out once, in the order in which the jobs ended."""
        reports, self._reports = self._reports, []
        return reports

    def has_reports(self) -> bool:
        """Whether `take_reports` would hand out any."""
        return bool(self._reports)

    def is_open(self, job_id: int) -> bool:
        """Whether the job is queued, running or quarantined here."""
        return job_id in self._jobs

    def is_idle(self) -> bool:
        """Whether no job is queued, running or quarantined."""
        return not self._jobs

    def view(self) -> RankView:
        """The state in the model's words; a copy."""
        return RankView(
            lives={j: e.life for j, e in self._jobs.items()},
            over=frozenset(self._retired),
            ready=tuple(self._reports),
        )

    def snapshot(self) -> RankSnapshot:
        """Figures for gauges, tests and conformance."""
        lives = [e.life for e in self._jobs.values()]
        return RankSnapshot(
            queued=lives.count(Life.QUEUED),
            running=lives.count(Life.RUNNING),
            quarantined=lives.count(Life.QUARANTINED),
            unread_reports=len(self._reports),
        )

    def _move(self, entry: RankJob, action: str) -> None:
        new = RANK_LIFE.get((entry.life, action))
        if new is None:
            raise ProtocolError(f"job is {entry.life.value}", job_id=entry.job.job_id, rank=self._rank, action=action)
        entry.life = new

    def _report(self, entry: RankJob, action: str, result: Result, bad: tuple[int, ...]) -> None:
        self._move(entry, action)
        job_id = entry.job.job_id
        self._reports.append(Report(job_id=job_id, rank=self._rank, result=result, bad=bad))
        del self._jobs[job_id]
        self._retired[job_id] = None
        while len(self._retired) > RETIRED_REMEMBERED:
            self._retired.popitem(last=False)


def _all(job: Job) -> tuple[int, ...]:
    return tuple(range(len(job.block_ids)))
