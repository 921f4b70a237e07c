"""The refusal sweep: at a state, everything that the model forbids there is tried; each must be refused and change nothing."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.state import answers, differences
from conformance.refinement.world import BLOCK_SIZE, Divergence, State
from kvledger.errors import ProtocolError
from kvledger.protocol import Job, RankLedger, Report, Result

Attempt = tuple[str, Callable[[], Any]]


def sweep(adapter: LedgerAdapter, state: State) -> int:
    """Returns how many attempts were refused.

    Raises:
        Divergence: something forbidden went through, or an answer to core is not the model's.
    """
    tried = 0
    for name, attempt in _forbidden(adapter, state):
        tried += 1
        if not _refused(attempt):
            raise Divergence(f"{name} goes through although the model forbids it")
    wrong = [*differences(adapter, state), *answers(adapter, state)]
    if wrong:
        raise Divergence(f"after the refusals: {wrong[0]}")
    return tried


def _refused(attempt: Callable[[], Any]) -> bool:
    """Refused: an error of the protocol, or the documented answer that nothing was done."""
    try:
        return attempt() is False
    except ProtocolError:
        return True


def _forbidden(adapter: LedgerAdapter, state: State) -> Iterator[Attempt]:
    for j, job in adapter.jobs.items():
        for k, rank in enumerate(adapter.rank):
            yield from _on_rank(adapter, state["rk"][k][j - 1]["st"], job, k, rank)
            yield from _report(adapter, state["led"][j - 1], job, k)
        yield from _pins(adapter, state["led"][j - 1], job)
    for r, tracker in enumerate(state["trk"], 1):
        yield from _emit(adapter, str(r), tracker)
        if state["rst"][r - 1] != "none":
            yield from _hits(adapter, str(r), state)


def _on_rank(adapter: LedgerAdapter, life: str, job: Job, k: int, rank: RankLedger) -> Iterator[Attempt]:
    j, now = job.job_id, adapter.now
    forbidden: list[Attempt] = []
    if life != "none":
        forbidden.append(("accept", lambda: rank.accept(job)))
    if life not in ("none", "queued"):
        forbidden.append(("drop", lambda: rank.drop(job)))
    if life != "queued":
        forbidden += [("start_job", lambda: rank.start_job(j, now)), ("cancel", lambda: rank.cancel(j))]
    if life != "running":
        forbidden += [
            ("finish", lambda: rank.finish(j, Result.DONE)),
            ("quarantine", lambda: rank.quarantine(j, (), now)),
            ("proceed", lambda: rank.proceed(j, now)),
            ("give_up", lambda: rank.give_up(j)),
        ]
    for name, attempt in forbidden:
        yield f"{name} of job {j} on rank {k}, where it is {life},", attempt
    if life in ("running", "quar"):
        yield f"expire of job {j} on rank {k} before its bound", lambda: rank.expire(now) != []


def _report(adapter: LedgerAdapter, entry: State, job: Job, k: int) -> Iterator[Attempt]:
    j = job.job_id
    reports = [Report(job_id=j, rank=adapter.ranks, result=Result.DONE)]
    if entry["st"] != "live" or k + 1 in entry["rep"]:
        reports.append(Report(job_id=j, rank=k, result=Result.DONE))
    else:
        reports += [
            Report(job_id=j, rank=k, result=Result.FAILED),
            Report(job_id=j, rank=k, result=Result.DONE, bad=(0,)),
            Report(job_id=j, rank=k, result=Result.FAILED, bad=(len(job.block_ids),)),
        ]
    for report in reports:
        yield f"{report}", functools.partial(adapter.ledger.apply_report, report, adapter.now)


def _pins(adapter: LedgerAdapter, entry: State, job: Job) -> Iterator[Attempt]:
    if entry["st"] == "live" and entry["held"]:
        yield f"a second pin for job {job.job_id}", lambda: adapter.pins.pin(job.job_id, job.block_ids)
    else:
        yield f"a release of job {job.job_id}", lambda: adapter.pins.unpin(job.job_id)


def _emit(adapter: LedgerAdapter, request: str, tracker: State) -> Iterator[Attempt]:
    ledger, now = adapter.ledger, adapter.now
    yield f"a store for {request} beyond its blocks", lambda: ledger.emit_store(request, 9, [0], [b"a"], now=now)
    if tracker["gen"] == 0 or tracker["load"] in ("pending", "tainted"):
        yield f"a load for {request}", lambda: ledger.emit_load(request, [0], [b"a"], sync=False, now=now)
    if tracker["gen"] and tracker["load"] in ("pending", "tainted"):
        yield (
            f"a store for {request} on a load that is {tracker['load']}",
            lambda: ledger.emit_store(request, 1, [0], [b"?"], now=now) is not None,
        )


def _hits(adapter: LedgerAdapter, name: str, state: State) -> Iterator[Attempt]:
    request, r = adapter.requests[name], int(name) - 1
    if state["nohit"][r]:
        yield f"a hit offered to {name}, whose load failed,", lambda: adapter.side.match(request, 0)[0] != 0
    generation = state["trk"][r]["gen"]  # none after a refused reset: an admission would begin one
    asked = name in adapter.side.view().asked
    if generation and request.num_computed_tokens and not asked and state["rst"][r] == "running":
        yield (
            f"tokens accepted for {name} that nobody offered",
            lambda: adapter.side.admitted(request, [1], BLOCK_SIZE),
        )
