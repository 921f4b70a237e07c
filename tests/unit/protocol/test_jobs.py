"""The protocol's values: a job's life and results, defaults, and that what travels or is handed out cannot be changed."""

import dataclasses
from typing import Any

import pytest

from kvledger.protocol import RANK_LIFE, Job, Kind, Life, RankLedger, Report, Result, StepPlan, Tracker
from kvledger.protocol.rank import RankJob
from tests.support.ledgers import done, make_ledger, store

RANK_STEPS = {
    "RankStart": {"queued": "running"},
    "RankDrop": {"queued": "reported"},
    "RankFinish": {"running": "reported"},
    "RankQuarantine": {"running": "quarantined"},
    "RankExpire": {"running": "reported", "quarantined": "reported"},
}
"""`RANK_LIFE`, written down once more from docs/protocol.md."""


def test_a_jobs_life_on_a_rank():
    steps = {(old, action): new for action, moves in RANK_STEPS.items() for old, new in moves.items()}
    assert {(old.value, action): new.value for (old, action), new in RANK_LIFE.items()} == steps
    assert {life.value for life in Life} == {"queued", "running", "quarantined", "reported"}


def test_results_are_ordered_from_good_to_bad():
    assert [r.name for r in sorted(Result)] == ["DONE", "REFUSED", "FAILED", "DROPPED", "INDETERMINATE"]


def test_what_a_job_or_report_is_when_nothing_more_is_said():
    job = Job(job_id=1, kind=Kind.STORE, generation=1, block_ids=(1,), hashes=(b"a",))
    assert (job.group, job.epoch, job.reply_to, job.sync) == (0, "", "", False)
    assert Report(job_id=1, rank=0, result=Result.DONE).bad == ()
    assert (StepPlan(namespace="ns").jobs, StepPlan(namespace="ns").cancelled) == ((), ())


def examples() -> dict[str, Any]:
    ledger = make_ledger("r")
    job = store(ledger, "r", 1)
    rank = RankLedger(rank=0, stuck_after_s=1.0, quarantine_s=1.0)
    return {
        "job": job,
        "report": done(job),
        "open job": ledger._open[job.job_id],
        "settled": ledger.apply_report(done(job), 0.0),
        "ledger's figures": ledger.snapshot(),
        "pins' figures": ledger.snapshot().pins,
        "rank's figures": rank.snapshot(),
        "ledger's view": ledger.view(),
        "rank's view": rank.view(),
        "plan": StepPlan(namespace="ns"),
        "rank's job": RankJob(job),
        "tracker": Tracker(1),
    }


EXAMPLES = examples()
RECORDS = {"open job", "rank's job", "tracker"}
"""What the ledgers keep for themselves and change."""


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - RECORDS))
def test_a_value_cannot_be_changed(name):
    value = EXAMPLES[name]
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_misspelt_field_is_refused(name):
    with pytest.raises((AttributeError, TypeError)):
        EXAMPLES[name].result_ = None
