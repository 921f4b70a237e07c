"""`view()` of both ledgers: the whole state in the model's words, and nothing that changes with the ledger later."""

from kvledger.protocol import Kind, LedgerView, Life, Load, OpenJobView, RankView, Report, Result, TrackerView
from tests.support.ledgers import HASHES, OTHER, bad, done, load, make_job, make_ledger, make_rank, store


def test_of_a_fresh_ledger_holds_nothing():
    assert make_ledger().view() == LedgerView(
        next_job=1, epoch="", led={}, trk={}, pins={}, known=frozenset(), nohit=frozenset()
    )


def test_of_a_ledger_names_every_variable_of_the_model():
    ledger = make_ledger()
    ledger.reset("e1")
    for request in ("saver", "loader", "unlucky"):
        ledger.begin_generation(request)
    ledger.apply_report(bad(load(ledger, "unlucky", **OTHER), 0, Result.FAILED), 0.0)
    ledger.apply_report(bad(store(ledger, "saver", 3), 0, Result.FAILED, 1), 0.0)
    loading = load(ledger, "loader", blocks=[30], hashes=[b"new"])
    again = store(ledger, "saver", 4, now=100.0)

    view = ledger.view()

    assert view == LedgerView(
        next_job=5,
        epoch="e1",
        led={
            3: OpenJobView(job=loading, req="loader", items=(), held=(), rep=frozenset()),
            4: OpenJobView(job=again, req="saver", items=(1, 3), held=(11, 13), rep=frozenset()),
        },
        trk={
            "saver": TrackerView(gen=1, front=4, retry=frozenset(), att={1: 1}, load=Load.NONE, job=None),
            "loader": TrackerView(gen=2, front=0, retry=frozenset(), att={}, load=Load.PENDING, job=3),
            "unlucky": TrackerView(gen=3, front=0, retry=frozenset(), att={}, load=Load.FAILED, job=1),
        },
        pins={11: 1, 13: 1},
        known=frozenset({HASHES[0], HASHES[2]}),
        nohit=frozenset({"unlucky"}),
    )


def test_of_a_ledger_says_which_ranks_have_reported_and_what_waits_to_be_issued_again():
    ledger = make_ledger("r", num_ranks=2)
    job = store(ledger, "r", 2)
    ledger.apply_report(done(job, 1), 0.0)
    assert ledger.view().led[1].rep == {1}
    ledger.apply_report(bad(job, 0, Result.FAILED, 1), 0.0)
    assert ledger.view().trk["r"].retry == {1}


def test_does_not_change_with_the_ledger():
    ledger, rank = make_ledger("r"), make_rank(1)
    job = store(ledger, "r", 2)
    views = ledger.view(), rank.view()
    shown = repr(views)
    ledger.apply_report(bad(job, 0, Result.FAILED, 0), 0.0)
    load(ledger, "r")
    ledger.reset("e1")
    rank.start(Kind.STORE, 0.0)
    rank.finish(1, Result.DONE)
    assert repr(views) == shown


def test_of_a_rank_holds_the_lives_of_its_jobs_and_what_is_not_handed_out():
    rank = make_rank(1, 2, running=True)
    rank.accept(make_job(3))
    for job_id in (4, 5):
        rank.drop(make_job(job_id))
        if job_id == 4:
            rank.take_reports()
    rank.quarantine(2, (0,), 0.0)
    assert rank.view() == RankView(
        lives={1: Life.RUNNING, 2: Life.QUARANTINED, 3: Life.QUEUED},
        over=frozenset({4, 5}),
        ready=(Report(job_id=5, rank=3, result=Result.DROPPED, bad=(0, 1)),),
    )
