# ruff: noqa: SLF001 - compares kvledger's private state with the model's variables on purpose
"""kvledger's protocol, driven along the model's edges; its state, abstracted, must equal the model's variables.

Core's choices (which block, which request, what arrived) are taken from the target state of the edge; everything that
kvledger decides is not: what it emits, pins, releases, retries, refuses, and in which life a job is.
"""

from typing import Any

from kvledger.errors import ProtocolError
from kvledger.protocol import Job, Kind, Ledger, RankLedger, Report, Result

NOW = 1.0
FAR = 1000.0
SILENT = frozenset({"Arrive", "Preempt", "PreemptForSpace", "RankForward", "DmaMove", "DmaFail", "Evict", "ForeignPut"})
"""Actions of core, the GPU, the transfer engine and the store that kvledger is not told of."""

State = dict[str, Any]


class Divergence(AssertionError):
    """kvledger did something else than the model."""


def _name(hash_letter: str) -> bytes:
    return hash_letter.encode()


class LedgerAdapter:
    """One scheduler side and its ranks, without vLLM, threads or a store."""

    def __init__(self, state: State) -> None:
        self.ranks = len(state["rk"])
        self.max_jobs = len(state["job"])
        self.blocks = len(state["ref"])

    def reset(self, *, max_attempts: int = 1) -> None:
        """Back to the initial state."""
        self.ledger = Ledger(
            num_ranks=self.ranks,
            max_pinned_blocks=self.blocks,
            max_store_attempts=max_attempts + 1,
            stall_timeout_s=FAR,
            retry_backoff_s=0.0,
        )
        self.rank = [RankLedger(rank=k, stuck_after_s=FAR, quarantine_s=FAR) for k in range(self.ranks)]
        self.pipe: list[tuple[list[Job], list[Report]]] = []
        self.jobs: dict[int, Job] = {}

    # -- edges -------------------------------------------------------------

    def do(self, action: str, before: State, after: State) -> None:
        """Perform one edge.

        Raises:
            Divergence: kvledger refuses it, or there is no such action here.
        """
        if action in SILENT:
            return
        method = getattr(self, "do_" + action, None)
        if method is None:
            raise Divergence(f"the adapter does not know the action {action}")
        try:
            method(before, after)
        except ProtocolError as error:
            raise Divergence(f"{action} is refused: {error}") from error

    def _build(self, before: State, after: State, *, admitted: bool) -> None:
        request = next(s for s in after["pipe"] if s["on"])["req"]
        name = str(request)
        if admitted:
            self.ledger.begin_generation(name)
        for other in before["preempted"] - {request}:
            self.ledger.end_generation(str(other))
        number = before["nextJob"]
        sent = after["job"][number - 1] if number <= self.max_jobs else None
        if sent is not None and sent["kind"] == "load" and before["job"][number - 1]["kind"] == "none":
            items = sorted(sent["items"])
            job: Job | None = self.ledger.emit_load(
                name, [b for _, b, _ in items], [_name(h) for _, _, h in items], sync=sent["sync"], now=NOW
            )
        else:
            job = self._store(name, request, before, after)
        if admitted:
            # In the code the lookup forgets what it missed before the step is built, and stores it again at once; the
            # model still believes it stored in this step (docs/found.md, M1). Here the model's order is kept.
            self.ledger.forget_known([_name(h) for h in before["known"] - after["known"]])
        jobs = [] if job is None else [job]
        for one in jobs:
            self.jobs[one.job_id] = one
        self.pipe.append((jobs, []))

    def _store(self, name: str, request: int, before: State, after: State) -> Job | None:
        storable = after["full"][request - 1]
        if not self.ledger.wants_store(name, storable, NOW):
            return None
        if before["nextJob"] > self.max_jobs:  # the model's only bound on time: as if the budget were used up
            self.ledger._pins.fits = lambda _chosen, _block: False  # type: ignore[method-assign]
        hashes = [_name(h) for h in after["rp"][request - 1]]
        return self.ledger.emit_store(name, storable, after["tbl"][request - 1], hashes, now=NOW)

    def do_Compute(self, before: State, after: State) -> None:  # noqa: N802 - the model's name
        self._build(before, after, admitted=False)

    def do_AdmitCompute(self, before: State, after: State) -> None:  # noqa: N802
        self._build(before, after, admitted=True)

    def do_AdmitLoad(self, before: State, after: State) -> None:  # noqa: N802
        self._build(before, after, admitted=True)

    def do_EmptyStep(self, before: State, _after: State) -> None:  # noqa: N802
        for other in before["preempted"]:
            if before["rgen"][other - 1] == 0 and _after["trk"][other - 1]["gen"] == 0:
                self.ledger.end_generation(str(other))
        self.pipe.append(([], []))

    def _gone(self, before: State, after: State) -> None:
        for r, (old, new) in enumerate(zip(before["rst"], after["rst"], strict=True), 1):
            if old != new:
                self.ledger.end_generation(str(r))

    def do_Finish(self, before: State, after: State) -> None:  # noqa: N802
        self._gone(before, after)

    def do_Abort(self, before: State, after: State) -> None:  # noqa: N802
        self._gone(before, after)

    def do_UpdateFromOutput(self, _before: State, _after: State) -> None:  # noqa: N802
        _, reports = self.pipe.pop(0)
        for report in reports:
            settled = self.ledger.apply_report(report, NOW)
            if settled is not None and settled.job.kind is Kind.LOAD and settled.bad:
                self.ledger.forget_known([settled.job.hashes[p] for p in settled.bad])

    def do_RankAccept(self, before: State, after: State) -> None:  # noqa: N802
        k = _changed(before["hooked"], after["hooked"])
        for job in self.pipe[before["hooked"][k]][0]:
            self.rank[k].accept(job)

    def do_TakeReports(self, before: State, after: State) -> None:  # noqa: N802
        k = _changed(before["polled"], after["polled"])
        self.pipe[before["polled"][k]][1].extend(self.rank[k].take_reports())

    def do_RankStart(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        started = self.rank[k].start(self.jobs[j].kind, NOW)
        if started is None or started.job_id != j:
            raise Divergence(f"rank {k} starts {started}, the model job {j}")

    def do_RankDrop(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        self.rank[k].drop(self.jobs[j])

    def do_RankFinish(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        bad = self._positions(j, after["rk"][k][j - 1]["bad"])
        self.rank[k].finish(j, Result.FAILED if bad else Result.DONE, bad)

    def do_RankQuarantine(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        if not self.rank[k].quarantine(j, self._positions(j, after["rk"][k][j - 1]["bad"]), NOW):
            raise Divergence(f"rank {k} refuses to quarantine job {j}")

    def do_RankExpire(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        entry = self.rank[k]._jobs[j]
        entry.until = NOW
        entry.bad = entry.bad and self._positions(j, after["rk"][k][j - 1]["bad"])
        if self.rank[k].expire(NOW) != [j]:
            raise Divergence(f"rank {k} does not expire job {j}")

    def _positions(self, j: int, indices: frozenset[int]) -> tuple[int, ...]:
        first = self._first.get(j, 1)
        return tuple(sorted(i - first for i in indices))

    # -- states ------------------------------------------------------------

    @property
    def _first(self) -> dict[int, int]:
        """Model index of position 0 of each job."""
        return {j: min(self._index[j]) for j in self._index}

    _index: dict[int, list[int]]

    def learn(self, state: State) -> None:
        """Note the indices of the jobs in a state (they are forgotten in it when they are over)."""
        known: dict[int, list[int]] = getattr(self, "_index", {})
        for j, job in enumerate(state["job"], 1):
            if job["items"]:
                known[j] = sorted(i for i, _, _ in job["items"])
        self._index = known

    def compare(self, state: State) -> list[str]:
        """Where kvledger's state differs from the model's."""
        return [*self._compare_jobs(state), *self._compare_trackers(state), *self._compare_ranks(state)]

    def _compare_jobs(self, state: State) -> list[str]:
        out = []
        live = {j: e for j, e in enumerate(state["led"], 1) if e["st"] == "live"}
        mine = {j: (frozenset(range(self.ranks)) - frozenset(e.waiting)) for j, e in self.ledger._open.items()}
        theirs = {j: frozenset(k - 1 for k in e["rep"]) for j, e in live.items()}
        if mine != theirs:
            out.append(f"open jobs and who has reported: {mine}, model {theirs}")
        pins: dict[int, int] = {}
        for entry in live.values():
            for b in entry["held"]:
                pins[b] = pins.get(b, 0) + 1
        if dict(self.ledger._pins.blocks()) != pins:
            out.append(f"pins: {dict(self.ledger._pins.blocks())}, model {pins}")
        for j in live:
            items = sorted(state["job"][j - 1]["items"])
            job = self.jobs[j]
            if (job.block_ids, job.hashes) != (tuple(b for _, b, _ in items), tuple(_name(h) for _, _, h in items)):
                out.append(f"job {j}: {job.block_ids} {job.hashes}, model {items}")
        letters = {h for prompt in state["rp"] for h in prompt} | set(state["known"])
        known = {h for h in letters if _name(h) in self.ledger._known}
        if known != set(state["known"]):
            out.append(f"known stored: {known}, model {set(state['known'])}")
        return out

    def _compare_trackers(self, state: State) -> list[str]:
        theirs = {
            str(r): (_due(t["front"], {i - 1 for i in t["retry"]}, len(state["rp"][r - 1])), t["load"])
            for r, t in enumerate(state["trk"], 1)
            if t["gen"]
        }
        mine = {
            r: (
                _due(t.frontier, set(t.retry), len(state["rp"][int(r) - 1])),
                "none" if t.load.value == "loaded" else t.load.value,
            )
            for r, t in self.ledger._trackers.items()
        }
        return [] if mine == theirs else [f"trackers (still to store, load): {mine}, model {theirs}"]

    def _compare_ranks(self, state: State) -> list[str]:
        lives = {"queued": "queued", "running": "running", "quar": "quarantined"}
        out = []
        for k, row in enumerate(state["rk"]):
            theirs = {j: lives[e["st"]] for j, e in enumerate(row, 1) if e["st"] in lives}
            mine = {j: e.life.value for j, e in self.rank[k]._jobs.items()}
            if mine != theirs:
                out.append(f"jobs of rank {k}: {mine}, model {theirs}")
            ready = {j: self._positions(j, e["bad"]) for j, e in enumerate(row, 1) if e["st"] == "ready"}
            unread = {r.job_id: r.bad for r in self.rank[k]._reports}
            if unread != ready:
                out.append(f"unread reports of rank {k}: {unread}, model {ready}")
        return out

    # -- refusals ----------------------------------------------------------

    def sweep(self, state: State) -> int:
        """Try what the model forbids here; each must be refused and change nothing. Returns how many were tried.

        Raises:
            Divergence: something forbidden went through.
        """
        tried = 0
        for j, job in self.jobs.items():
            for k, rank in enumerate(self.rank):
                tried += self._sweep_rank(state, j, job, k, rank)
                tried += self._sweep_report(state, j, job, k)
        for r, tracker in enumerate(state["trk"], 1):
            tried += self._sweep_emit(str(r), tracker)
        wrong = self.compare(state)
        if wrong:
            raise Divergence(f"a refusal changed something: {wrong[0]}")
        return tried

    def _sweep_rank(self, state: State, j: int, job: Job, k: int, rank: RankLedger) -> int:
        life, tried = state["rk"][k][j - 1]["st"], 0
        forbidden = []
        if life != "none":
            forbidden.append(("accept", lambda: rank.accept(job)))
        if life not in ("none", "queued"):
            forbidden.append(("drop", lambda: rank.drop(job)))
        if life != "queued":
            forbidden += [("start_job", lambda: rank.start_job(j, NOW)), ("cancel", lambda: rank.cancel(j))]
        if life != "running":
            forbidden += [
                ("finish", lambda: rank.finish(j, Result.DONE)),
                ("quarantine", lambda: rank.quarantine(j, (), NOW)),
                ("proceed", lambda: rank.proceed(j, NOW)),
                ("give_up", lambda: rank.give_up(j)),
            ]
        for name, attempt in forbidden:
            tried += 1
            if not _refused(attempt):
                raise Divergence(f"rank {k} lets {name} of job {j} through although it is {life}")
        return tried

    def _sweep_report(self, state: State, j: int, job: Job, k: int) -> int:
        entry = state["led"][j - 1]
        reports = [Report(job_id=j, rank=self.ranks, result=Result.DONE)]
        if entry["st"] != "live" or k + 1 in entry["rep"]:
            reports.append(Report(job_id=j, rank=k, result=Result.DONE))
        else:
            reports += [
                Report(job_id=j, rank=k, result=Result.FAILED),
                Report(job_id=j, rank=k, result=Result.DONE, bad=(0,)),
                Report(job_id=j, rank=k, result=Result.FAILED, bad=(len(job.block_ids),)),
            ]
        for report in reports:
            if not _refused(lambda report=report: self.ledger.apply_report(report, NOW)):
                raise Divergence(f"{report} is taken although the model forbids it")
        return len(reports)

    def _sweep_emit(self, request: str, tracker: State) -> int:
        attempts = [lambda: self.ledger.emit_store(request, 9, [1], [b"a"], now=NOW)]
        if tracker["gen"] == 0 or tracker["load"] == "pending":
            attempts.append(lambda: self.ledger.emit_load(request, [1], [b"a"], sync=False, now=NOW))
        for attempt in attempts:
            if not _refused(attempt):
                raise Divergence(f"a job is emitted for request {request} although the model forbids it")
        return len(attempts)


def _refused(attempt: Any) -> bool:
    """Refused: an error of the protocol, or the documented answer that nothing was done."""
    try:
        return attempt() in (False, None) and attempt.__name__ == "<lambda>" and attempt() is False
    except ProtocolError:
        return True


def _due(frontier: int, retry: set[int], length: int) -> frozenset[int]:
    """Block indices still to be stored. Whether one counts as never issued or as to be retried makes no difference: under
    pressure kvledger leaves the frontier where it is when nothing can be issued, the model moves it and notes a retry."""
    return frozenset(range(frontier, length)) | retry


def _changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> int:
    return next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)


def _changed_job(before: State, after: State) -> tuple[int, int]:
    k = _changed(before["rk"], after["rk"])
    return k, _changed(before["rk"][k], after["rk"][k]) + 1
