"""kvledger's scheduler side and rank ledgers, driven along the model's edges at vLLM's hooks.

Core's choices (which block, which request, what arrived, how long something takes) are taken from the edge; everything
that kvledger decides is not: what it offers, emits, pins, releases, retries and refuses, and in which life a job is.
The scheduler side is the real one (`scheduler/side.py` over `protocol/`), so are the rank ledgers; the worker's threads,
fences and copies are not here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from conformance.refinement import world
from conformance.refinement.world import BLOCK_SIZE, KEYS, NEVER_S, Bounds, CoreRequest, Divergence, State
from kvledger import assembly
from kvledger.errors import ProtocolError
from kvledger.protocol import Job, LedgerView, PinTable, RankLedger, Report, Result
from kvledger.scheduler.side import SchedulerSide

SILENT = frozenset({"RankForward"})
"""Actions that nothing of this is told of."""


class TourPins(PinTable):
    """A budget that the model's bound on jobs can use up."""

    closed = False

    def fits(self, chosen: int, block_id: int) -> bool:
        """As ever, until the model may emit no more jobs."""
        return not self.closed and super().fits(chosen, block_id)


class TourRank(RankLedger):
    """A rank's ledger whose bounds pass when the model says so."""

    def let_pass(self, job_id: int, now: float) -> None:
        """The bound of this job passes."""
        if job_id in self._jobs:
            self._jobs[job_id].until = now


class LedgerAdapter:
    """One scheduler side and the ledgers of its ranks, without vLLM, threads or transfers."""

    def __init__(self, state: State, bounds: Bounds) -> None:
        self.bounds = bounds
        self.ranks = len(state["rk"])
        self._settings = bounds.settings()
        self._plan = world.plan(blocks=len(state["ref"]), ranks=self.ranks)
        self.coarse = bounds.max_pinned < len(state["ref"])
        """Whether frontier and retry are looked at together (`ledger_state`)."""
        self._may_load = assembly.may_load(consumer=bounds.defer_free, steps_in_flight=bounds.depth)
        self.reset()

    def reset(self) -> None:
        """Back to the initial state."""
        self.now = 1.0
        self.pool = world.Pool(self._plan.num_blocks - 1)
        self.objects = world.Objects(self.ranks)
        self.pins = TourPins(assembly.pin_budget(self._settings, self._plan))
        self.ledger = assembly.make_ledger(self._settings, self._plan, pins=self.pins)
        self.side = SchedulerSide(
            settings=self._settings,
            plan=self._plan,
            keys=KEYS,
            ledger=self.ledger,
            lookups=self.objects if self._may_load else None,  # type: ignore[arg-type]
            may_save=True,
            recorder=None,
            clock=lambda: self.now,
        )
        self.side.bind_pool(self.pool)
        self.side.bind_tables(lambda request_id: self.tables.get(request_id, []))
        self.rank = [TourRank(rank=k, stuck_after_s=NEVER_S, quarantine_s=NEVER_S) for k in range(self.ranks)]
        self.requests: dict[str, CoreRequest] = {}
        self.tables: dict[str, list[int]] = {}
        self.pipe: list[tuple[tuple[Job, ...], list[Report]]] = []
        self.jobs: dict[int, Job] = {}
        self.indices: dict[int, list[int]] = {}
        """Per job: the model's block index of each position."""
        self.said: dict[tuple[int, int], Report] = {}
        self.epochs = [self.ledger.epoch]
        self.late: list[int] = []
        """Jobs whose bytes moved when their rank had reported them."""

    def view(self) -> LedgerView:
        """The scheduler side's ledger in the model's words."""
        return self.side.view().ledger

    # -- edges -------------------------------------------------------------

    def do(self, action: str, before: State, after: State) -> None:
        """Perform one edge.

        Raises:
            Divergence: kvledger refuses it, does something else, or there is no such action here.
        """
        if action in SILENT:
            return
        method = getattr(self, "do_" + action, None)
        if method is None:
            raise Divergence(f"the adapter does not know the action {action}")
        try:
            for name, old, new in _tables(before, after):  # core gives blocks before the connector hears of it
                more = Counter(new) - Counter(old)
                self.pool.touch(self.pool.blocks[b] for b in more.elements())
                if more:
                    self.tables[name] = new
            method(before, after)
        except ProtocolError as error:
            raise Divergence(f"{action} is refused: {error}") from error
        for name, old, new in _tables(before, after):  # and takes blocks afterwards
            less = Counter(old) - Counter(new)
            self.pool.free_blocks(self.pool.blocks[b] for b in less.elements())
            self.tables[name] = new

    # -- the scheduler process ---------------------------------------------

    def do_Arrive(self, before: State, after: State) -> None:  # noqa: N802 - the model's name
        r = _changed(before["rst"], after["rst"])
        name = str(r + 1)
        self.requests[name] = CoreRequest(name, [_name(h) for h in after["rp"][r]])

    def do_Compute(self, before: State, after: State) -> None:  # noqa: N802
        name = _scheduled(before, after)
        self._compute(before, after, name, before["full"][int(name) - 1])

    def do_AdmitCompute(self, before: State, after: State) -> None:  # noqa: N802
        name = _scheduled(before, after)
        request, local = self.requests[name], _local_prefix(before, after, name)
        self.side.match(request, local * BLOCK_SIZE)  # whatever it offers, core does not accept it
        self.side.admitted(request, self.tables[name], 0)
        self._compute(before, after, name, local)

    def do_AdmitLoad(self, before: State, after: State, *, asynchronous: bool = True) -> None:  # noqa: N802
        name = _scheduled(before, after)
        request, local = self.requests[name], _local_prefix(before, after, name)
        wanted = sum(b != 0 for b in after["tbl"][int(name) - 1]) - local - (not asynchronous)
        offered, later = self.side.match(request, local * BLOCK_SIZE)
        if (offered or 0) < wanted * BLOCK_SIZE:
            raise Divergence(f"kvledger offers {(offered or 0) // BLOCK_SIZE} blocks, the model loads {wanted}")
        if later != asynchronous:
            raise Divergence(f"kvledger loads {'asynchronously' if later else 'synchronously'}, the model does not")
        self.side.admitted(request, self.tables[name], wanted * BLOCK_SIZE)
        request.num_computed_tokens = (local + wanted) * BLOCK_SIZE
        self._build(before, after, name, 0 if asynchronous else BLOCK_SIZE)

    def do_AdmitSyncLoad(self, before: State, after: State) -> None:  # noqa: N802
        self.do_AdmitLoad(before, after, asynchronous=False)

    def _compute(self, before: State, after: State, name: str, done: int) -> None:
        """A block of a request is computed, or half of one, behind those that are done."""
        self.requests[name].num_computed_tokens = done * BLOCK_SIZE
        self._build(before, after, name, max(1, int(after["full"][int(name) - 1] - done) * BLOCK_SIZE))

    def _build(self, before: State, after: State, name: str, tokens: int) -> None:
        if before["nextJob"] > self.bounds.max_job:  # the model's only bound on time: as if the budget were used up
            self.pins.closed = True
        scheduled = {name: tokens} if tokens else {}
        self._send(world.StepOutput({str(x) for x in before["preempted"]}, scheduled, self.tables), before, after)
        self.requests[name].num_computed_tokens += tokens

    def _send(self, output: world.StepOutput, before: State, after: State) -> None:
        step = self.side.build_step(output)
        for job in step.jobs:
            self.jobs[job.job_id] = job
            sent = after["job"][before["nextJob"] - 1] if before["nextJob"] <= len(after["job"]) else {"items": ()}
            self.indices[job.job_id] = sorted(i for i, _, _ in sent["items"]) or [*range(1, len(job.block_ids) + 1)]
        self.pipe.append((step.jobs, []))

    def do_EmptyStep(self, before: State, after: State) -> None:  # noqa: N802
        if not self.side.has_open_jobs() and not any(s != "none" for s in before["rst"]):
            raise Divergence("there is no request and kvledger has no push work, so core does not step")
        self._send(world.StepOutput({str(x) for x in before["preempted"]}), before, after)

    def do_Preempt(self, before: State, after: State) -> None:  # noqa: N802
        request = self.requests[str(_changed(before["rst"], after["rst"]) + 1)]
        request.num_preemptions += 1
        request.num_computed_tokens = 0

    def do_PreemptForSpace(self, before: State, after: State) -> None:  # noqa: N802
        if self.side.has_pending_block_frees():
            raise Divergence("kvledger says that blocks are about to be freed, so core waits and does not preempt")
        self.do_Preempt(before, after)

    def do_Finish(self, before: State, after: State) -> None:  # noqa: N802
        self.side.finished(self.requests[str(_changed(before["rst"], after["rst"]) + 1)])

    do_Abort = do_Finish  # noqa: N815

    def do_Reset(self, before: State, after: State) -> None:  # noqa: N802
        if not self.side.reset(refused=False):
            raise Divergence("kvledger refuses to reset")
        self.epochs.append(self.ledger.epoch)
        if before["store"] != after["store"]:
            self.objects.wipe()

    def do_ResetRefused(self, _before: State, _after: State) -> None:  # noqa: N802
        if self.side.reset(refused=True):
            raise Divergence("kvledger calls a refused reset a success")
        self.epochs.append(self.ledger.epoch)

    def do_UpdateFromOutput(self, before: State, after: State) -> None:  # noqa: N802
        _, reports = self.pipe.pop(0)
        self.pool.evicted = set()
        self.side.apply_reports(reports)
        for r, full in enumerate(
            after["full"]
        ):  # after a load what arrived is computed; after a failed one what is before
            if (full, after["rst"][r]) != (before["full"][r], before["rst"][r]):
                self.requests[str(r + 1)].num_computed_tokens = full * BLOCK_SIZE
        cached = enumerate(zip(before["cached"], after["cached"], strict=True), 1)
        lost, left = {b for b, (old, new) in cached if new == "none" != old}, self.pool.evicted
        if not lost <= left:
            raise Divergence(f"blocks {sorted(lost)} hold wrong bytes, and {sorted(left)} left the prefix cache")

    def do_StallTimeout(self, _before: State, _after: State) -> None:  # noqa: N802
        self.now += self._settings.stall_timeout_s + 1.0

    def do_BecomeCalm(self, _before: State, _after: State) -> None:  # noqa: N802
        """Nothing: the disturbances stay away from now on."""

    # -- ranks -------------------------------------------------------------

    def do_RankAccept(self, before: State, after: State) -> None:  # noqa: N802
        k = _changed(before["hooked"], after["hooked"])
        for job in self.pipe[before["hooked"][k]][0]:
            self.rank[k].accept(job)

    def do_TakeReports(self, before: State, after: State) -> None:  # noqa: N802
        k = _changed(before["polled"], after["polled"])
        reports = self.rank[k].take_reports()
        self.said.update({(k, r.job_id): r for r in reports})
        self.pipe[before["polled"][k]][1].extend(reports)

    def do_ReplayReport(self, before: State, after: State) -> None:  # noqa: N802
        ((k, j),) = after["pipe"][0]["rep"] - before["pipe"][0]["rep"]
        self.pipe[0][1].append(self.said[k - 1, j])

    def do_RankStart(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        started = self.rank[k].start(self._job(j).kind, self.now)
        if started is None or started.job_id != j:
            raise Divergence(f"rank {k} starts {started}, the model job {j}")

    def do_RankDrop(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        self.rank[k].drop(self._job(j))

    def do_RankFinish(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        bad = self.positions(j, before["rk"][k][j - 1]["bad"])
        self.rank[k].finish(j, Result.FAILED if bad else Result.DONE, bad)

    def do_RankQuarantine(self, before: State, after: State) -> None:  # noqa: N802
        k, j = _changed_job(before, after)
        if not self.rank[k].quarantine(j, self.positions(j, after["rk"][k][j - 1]["bad"]), self.now):
            raise Divergence(f"rank {k} refuses to quarantine job {j}")

    def do_RankExpire(self, before: State, after: State) -> None:  # noqa: N802
        """The bound of this job passes. It is longer than any transfer outlives its call: never while bytes move."""
        k, j = _changed_job(before, after)
        moving = any((rank, job) == (k + 1, j) for rank, job, _ in before["dma"])
        if not moving:
            self.rank[k].let_pass(j, self.now)
        if self.rank[k].expire(self.now) != [j]:
            why = "its bytes move, the bound has not passed" if moving else "why?"
            raise Divergence(f"rank {k} does not report job {j}: {why}")

    def _job(self, j: int) -> Job:
        if j not in self.jobs:
            raise Divergence(f"kvledger has emitted no job {j}")
        return self.jobs[j]

    def positions(self, j: int, indices: frozenset[int]) -> tuple[int, ...]:
        """Positions in the job of the model's block indices."""
        order = self.indices.get(j, [])
        return tuple(sorted(order.index(i) for i in indices if i in order))

    # -- the transfer engine and the store ----------------------------------

    def do_DmaMove(self, before: State, after: State) -> None:  # noqa: N802
        """A store's bytes go from the block that kvledger named to the key that kvledger made. (Loads: core's memory.)"""
        k, j, i = self._moved(before, after)
        job = self._job(j)
        if before["job"][j - 1]["kind"] == "store":
            position = self.indices[j].index(i)
            content = before["mem"][k - 1][job.block_ids[position] - 1]
            self.objects.put(k - 1, job.hashes[position], job.epoch, content)

    def do_DmaFail(self, before: State, after: State) -> None:  # noqa: N802
        """Told with the report."""
        self._moved(before, after)

    def _moved(self, before: State, after: State) -> tuple[int, int, int]:
        ((k, j, i),) = before["dma"] - after["dma"]
        if not self.rank[k - 1].is_open(j):
            self.late.append(j)
        return k, j, i

    def do_Evict(self, before: State, after: State) -> None:  # noqa: N802
        k, (letter, epoch) = _changed_object(before, after)
        self.objects.remove(k, _name(letter), self.epochs[epoch])

    def do_ForeignPut(self, before: State, after: State) -> None:  # noqa: N802
        k, (letter, epoch) = _changed_object(before, after)
        self.objects.put(k, _name(letter), self.epochs[epoch], after["store"][k][letter, epoch])


def _tables(before: State, after: State) -> Iterator[tuple[str, list[int], list[int]]]:
    """Requests whose block tables may differ: the blocks in them before and after."""
    if before["tbl"] != after["tbl"]:
        for r, tables in enumerate(zip(before["tbl"], after["tbl"], strict=True), 1):
            old, new = ([b for b in table if b] for table in tables)
            yield str(r), old, new


def _name(letter: str) -> bytes:
    return letter.encode()


def _changed(before: Any, after: Any) -> int:
    return next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)


def _changed_job(before: State, after: State) -> tuple[int, int]:
    k = _changed(before["rk"], after["rk"])
    return k, _changed(before["rk"][k], after["rk"][k]) + 1


def _changed_object(before: State, after: State) -> tuple[int, tuple[str, int]]:
    k = _changed(before["store"], after["store"])
    return k, next(x for x, content in after["store"][k].items() if content != before["store"][k][x])


def _scheduled(before: State, after: State) -> str:
    """Name of the request that the new step works for."""
    slot = sum(s["on"] for s in before["pipe"])
    return str(after["pipe"][slot]["req"])


def _local_prefix(before: State, after: State, name: str) -> int:
    """Blocks at the head of the new table that were in the prefix cache: core's local hit."""
    r = int(name) - 1
    prompt, table = after["rp"][r], after["tbl"][r]
    count = 0
    while count < len(prompt) - 1 and table[count] and before["cached"][table[count] - 1] == prompt[count]:
        count += 1
    return count
