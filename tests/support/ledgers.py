"""Ledgers, jobs and reports for the protocol's unit tests."""

from typing import Any

import pytest

from kvledger.protocol import Job, Kind, Ledger, PinTable, RankLedger, Report, Result, Settled

BLOCKS = [10, 11, 12, 13, 14, 15, 16, 17]
HASHES = [bytes([i]) * 8 for i in range(8)]
OTHER_BLOCKS = [20, 21, 22, 23]
OTHER_HASHES = [bytes([i]) * 8 for i in range(20, 24)]
OTHER: dict[str, Any] = {"blocks": OTHER_BLOCKS, "hashes": OTHER_HASHES}


def make_ledger(
    *requests: str, num_ranks: int = 1, max_pinned_blocks: int = 100, max_store_attempts: int = 3
) -> Ledger:
    """A ledger with a stall timeout of 10 s and a backoff of 1 s; the named requests have a generation."""
    ledger = Ledger(
        num_ranks=num_ranks,
        pins=PinTable(max_pinned_blocks),
        max_store_attempts=max_store_attempts,
        stall_timeout_s=10.0,
        retry_backoff_s=1.0,
    )
    for request in requests:
        ledger.begin_generation(request)
    return ledger


def store(ledger: Ledger, request: str, storable: int, *, now: float = 0.0, blocks=BLOCKS, hashes=HASHES) -> Job:
    """A store job; the test fails if there is none."""
    job = ledger.emit_store(request, storable, blocks, hashes, now=now)
    if job is None:
        pytest.fail("expected a store job")
    return job


def nothing_to_store(
    ledger: Ledger, request: str, storable: int, *, now: float = 0.0, blocks=BLOCKS, hashes=HASHES
) -> bool:
    """Whether the ledger issues nothing."""
    return ledger.emit_store(request, storable, blocks, hashes, now=now) is None


def load(
    ledger: Ledger, request: str, *, sync: bool = False, now: float = 0.0, blocks=BLOCKS[:2], hashes=HASHES[:2]
) -> Job:
    """A load job on two blocks."""
    return ledger.emit_load(request, blocks, hashes, sync=sync, now=now)


def settle(ledger: Ledger, report: Report, now: float = 0.0) -> Settled:
    """The job that the report settles; the test fails if it settles none."""
    settled = ledger.apply_report(report, now)
    if settled is None:
        pytest.fail("expected the report to settle its job")
    return settled


def done(job: Job, rank: int = 0) -> Report:
    """The rank's report that all is well."""
    return Report(job_id=job.job_id, rank=rank, result=Result.DONE)


def bad(job: Job, rank: int, result: Result, *positions: int) -> Report:
    """The rank's report that these positions (none named: all) went wrong."""
    return Report(job_id=job.job_id, rank=rank, result=result, bad=positions or tuple(range(len(job.block_ids))))


def declined(ledger: Ledger) -> dict[str, int]:
    """The counts of blocks or asks that were declined, without those that are 0."""
    return {name: count for name, count in ledger.snapshot().declined.items() if count}


def make_job(job_id: int, kind: Kind = Kind.STORE, **fields: Any) -> Job:
    """A job on two blocks, for tests of a rank."""
    given = {"generation": 1, "block_ids": (1, 2), "hashes": (b"a", b"b"), **fields}
    return Job(job_id=job_id, kind=kind, **given)


def make_rank(*jobs: int, running: bool = False) -> RankLedger:
    """Rank 3 (stuck after 10 s, quarantine 100 s), which has been told these store jobs and perhaps started them at 0 s."""
    rank = RankLedger(rank=3, stuck_after_s=10.0, quarantine_s=100.0)
    for job_id in jobs:
        rank.accept(make_job(job_id))
        if running:
            rank.start(Kind.STORE, 0.0)
    return rank
