"""The actions that are recorded: one function each, called where the action takes effect (see `observe/trace.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

from kvledger.observe.trace import TraceRecorder, short
from kvledger.protocol import Job, Ledger, Report, Settled

Progress = tuple[int, tuple[int, ...]]
Names = Callable[[int], list[bytes]]
"""Hashes of a request's first n blocks, as far as it has them."""


class Actions:
    """Writes events while `recorder` is there; without one each call returns at once."""

    def __init__(self, recorder: TraceRecorder | None, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger

    def begin_generation(
        self, request_id: str, generation: int, table: Sequence[int], names: Names, tokens: int
    ) -> None:
        """`BeginGeneration`, with `tokens` to load."""
        if self._recorder is not None:
            fields = {"external": tokens, **_known_table(table, names)}
            self._recorder.record("BeginGeneration", req=request_id, gen=generation, **fields)

    def end_generation(self, request_id: str, why: str) -> None:
        """`EndGeneration`, told before it takes effect."""
        if self._recorder is not None:
            generation = self._ledger.generation(request_id)
            self._recorder.record("EndGeneration", req=request_id, gen=generation, why=why)

    def end_request(self, request_id: str) -> None:
        """The request ended without a generation."""
        if self._recorder is not None:
            self._recorder.record("EndRequest", req=request_id)

    def emit_load(self, request_id: str, job: Job) -> None:
        """`EmitLoad`."""
        if self._recorder is not None:
            self._recorder.record("EmitLoad", req=request_id, sync=job.sync, **_fields(job))

    def progress(self, request_id: str) -> Progress | None:
        """What `emit_store` wants to know of the time before; None while nothing is recorded."""
        return None if self._recorder is None else self._ledger.progress(request_id)

    def emit_store(
        self,
        request_id: str,
        before: Progress | None,
        job: Job | None,
        storable: int,
        table: Sequence[int],
        names: Names,
    ) -> None:
        """`EmitStore`, if it changed anything: not while the store is left alone, step after step."""
        if self._recorder is None:
            return
        after = self._ledger.progress(request_id)
        if job is not None or after != before:
            fields = {"storable": storable, **_known_table(table, names), **_fields(job)}
            fields.setdefault("gen", self._ledger.generation(request_id))
            fields["frontier"], fields["retry"] = after
            self._recorder.record("EmitStore", req=request_id, **fields)

    def apply_report(self, report: Report, settled: Settled | None) -> None:
        """`ApplyReport`, and what follows from it if it settles the job."""
        if self._recorder is None:
            return
        fields: dict[str, Any] = {"rank": report.rank, "result": report.result.name, "bad": list(report.bad)}
        if settled is not None:
            fields["retry"] = self._ledger.progress(settled.request_id)[1]
            fields["tainted"] = settled.tainted
        self._recorder.record("ApplyReport", job=report.job_id, **fields)

    def release(self, settled: Settled) -> None:
        """`Release` of a job's pins."""
        if self._recorder is not None:
            self._recorder.record("Release", job=settled.job.job_id, blocks=list(settled.released))

    def evict_tainted(self, settled: Settled, request_id: str, blocks: Sequence[int]) -> None:
        """`EvictTainted`: blocks of a request that leave vLLM's prefix cache."""
        if self._recorder is not None:
            self._recorder.record("EvictTainted", job=settled.job.job_id, req=request_id, blocks=list(blocks))

    def forget(self, hashes: Sequence[bytes]) -> None:
        """`Forget`: hashes that a lookup or a load did not find."""
        if self._recorder is not None:
            self._recorder.record("Forget", names=list(map(short, hashes)))

    def reset(self, loading: set[str]) -> None:
        """`Reset`, with the requests whose load goes on."""
        if self._recorder is not None:
            self._recorder.record("Reset", epoch=self._ledger.epoch, loading=sorted(loading))

    def close(self) -> None:
        """End the recording."""
        if self._recorder is not None:
            self._recorder.close()


def _fields(job: Job | None) -> dict[str, Any]:
    """A job as it stands in a recording."""
    if job is None:
        return {"job": None}
    return {
        "job": job.job_id,
        "gen": job.generation,
        "blocks": list(job.block_ids),
        "names": list(map(short, job.hashes)),
    }


def _known_table(table: Sequence[int], names: Names) -> dict[str, Any]:
    """A block table as it stands in a recording, with the hashes of those of its blocks that have one."""
    return {"table": list(table), "hashes": list(map(short, names(len(table))))}
