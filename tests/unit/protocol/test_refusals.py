"""Every refusal of the protocol: what it says, whom it names, and that nothing has changed.

The texts are stated in full: whoever reads one in a log has nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvledger.errors import ProtocolError
from kvledger.protocol import Ledger, PinTable, Report, Result
from tests.support.ledgers import BLOCKS, HASHES, bad, done, load, make_job, make_ledger, make_rank, store


@dataclass(frozen=True)
class Refusal:
    """A call and its refusal. `where` is the end of the message, in brackets."""

    call: Callable[[Any], object]
    says: str
    action: str
    job: int | None = None
    rank: int | None = None

    def check(self, target: Any) -> None:
        """The target refuses as stated, and is as it was."""
        before = target.snapshot()
        with pytest.raises(ProtocolError) as caught:
            self.call(target)
        error = caught.value
        assert (error.action, error.job_id, error.rank) == (self.action, self.job, self.rank)
        where = [f"action {self.action}"]
        where += [] if self.job is None else [f"job {self.job}"]
        where += [] if self.rank is None else [f"rank {self.rank}"]
        assert str(error) == f"{self.says} ({', '.join(where)})"
        assert target.snapshot() == before


@pytest.mark.parametrize(("blocks", "hashes"), [((), ()), ((1, 2), (b"a",)), ((1,), (b"a", b"b"))])
def test_a_job_has_blocks_and_as_many_hashes(blocks, hashes):
    with pytest.raises(ProtocolError) as caught:
        make_job(7, block_ids=blocks, hashes=hashes)
    assert (caught.value.action, caught.value.job_id) == ("Emit", 7)
    assert str(caught.value) == (
        f"a job needs as many hashes as blocks, at least one: {len(blocks)} blocks, {len(hashes)} hashes (action Emit, job 7)"
    )


NO_GENERATION = "request 'x' has no current generation"
EMISSION = {
    "state of a load without a generation": Refusal(lambda it: it.load_state("x"), NO_GENERATION, "LoadState"),
    "load without a generation": Refusal(lambda it: load(it, "x"), NO_GENERATION, "EmitLoad"),
    "store without a generation": Refusal(lambda it: store(it, "x", 1), NO_GENERATION, "EmitStore"),
    "a second load": Refusal(lambda it: load(it, "loading"), "the load of generation 2 is pending", "EmitLoad"),
    "fewer blocks than storable": Refusal(
        lambda it: store(it, "r", 3, blocks=BLOCKS[:2]),
        "3 storable blocks, but 2 in the table and 8 hashes",
        "EmitStore",
    ),
    "fewer hashes than storable": Refusal(
        lambda it: store(it, "r", 3, hashes=HASHES[:2]),
        "3 storable blocks, but 8 in the table and 2 hashes",
        "EmitStore",
    ),
}


@pytest.mark.parametrize("case", EMISSION)
def test_emission_is_refused(case):
    ledger = make_ledger("r", "loading")
    load(ledger, "loading")
    EMISSION[case].check(ledger)
    assert store(ledger, "r", 1).job_id == 2


def apply(report: Report) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.apply_report(report, 1.0)


def test_reports_are_refused():
    ledger = make_ledger("r", num_ranks=2)
    job = store(ledger, "r", 2)
    settled = store(ledger, "r", 3)
    for rank in (0, 1):
        ledger.apply_report(done(settled, rank), 0.0)
    ledger.apply_report(done(job, 0), 0.0)
    one, other = job.job_id, settled.job_id
    unknown = Report(job_id=99, rank=0, result=Result.DONE)
    refusals = [
        Refusal(apply(done(job, 2)), "report of an unknown rank (ranks are 0 to 1)", "ApplyReport", one, 2),
        Refusal(
            apply(done(settled, 0)), "report for a job that every rank had already reported", "ApplyReport", other, 0
        ),
        Refusal(apply(unknown), "report for a job that was never emitted, or long ago", "ApplyReport", 99, 0),
        Refusal(apply(done(job, 0)), "second report of this rank for this job", "ApplyReport", one, 0),
        *(
            Refusal(
                apply(bad(job, 1, Result.FAILED, *positions)),
                f"bad positions {positions} outside the job's 2 blocks",
                "ApplyReport",
                one,
                1,
            )
            for positions in [(0, 2), (3,), (-1,)]
        ),
        Refusal(
            apply(Report(job_id=one, rank=1, result=Result.FAILED)),
            "result FAILED without a bad position",
            "ApplyReport",
            one,
            1,
        ),
        Refusal(apply(bad(job, 1, Result.DONE, 0)), "result DONE with bad positions", "ApplyReport", one, 1),
    ]
    for refusal in refusals:
        refusal.check(ledger)

    assert ledger.apply_report(done(job, 1), 1.0) is not None


PINS = {
    "twice": Refusal(lambda it: it.pin(1, (7,)), "job pins twice", "EmitStore", 1),
    "one block twice": Refusal(lambda it: it.pin(2, (7, 7)), "job pins one block twice", "EmitStore", 2),
    "over the budget": Refusal(
        lambda it: it.pin(2, (5, 7, 8)), "2 more pinned blocks exceed the budget: 2 of 3 in use", "EmitStore", 2
    ),
    "nothing to release": Refusal(lambda it: it.unpin(2), "job holds no pins", "ApplyReport", 2),
}


@pytest.mark.parametrize("case", PINS)
def test_pins_are_refused(case):
    pins = PinTable(3)
    pins.pin(1, (5, 6))
    PINS[case].check(pins)
    assert dict(pins.blocks()) == {5: 1, 6: 1}


RANK = {
    "told again while open": Refusal(lambda it: it.accept(make_job(1)), "job told twice", "RankAccept", 1, 3),
    "told again after its report": Refusal(lambda it: it.accept(make_job(2)), "job told twice", "RankAccept", 2, 3),
    "dropped again after its report": Refusal(lambda it: it.drop(make_job(2)), "job told twice", "RankAccept", 2, 3),
    "dropped while it runs": Refusal(lambda it: it.drop(make_job(1)), "job is running", "RankDrop", 1, 3),
    "finished before it started": Refusal(
        lambda it: it.finish(4, Result.DONE), "job does not run here, or ended long ago", "RankFinish", 4, 3
    ),
    "finished but never told": Refusal(
        lambda it: it.finish(9, Result.DONE), "job does not run here, or ended long ago", "RankFinish", 9, 3
    ),
}


@pytest.mark.parametrize("case", RANK)
def test_a_rank_refuses(case):
    rank = make_rank(1, running=True)
    rank.drop(make_job(2))
    rank.accept(make_job(4))
    RANK[case].check(rank)
