"""The adapter that drives kvledger along the model's edges is itself strict."""

import pytest

from conformance.refinement import bad_states, refusals
from conformance.refinement import state as ledger_state
from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.world import Bounds, Divergence, Objects, Pool

BOUNDS = Bounds(max_pinned=2, max_attempts=1, max_job=1, depth=1, defer_free=False, sync=False)
NO_STEP = {"on": False, "req": 0, "wr": frozenset(), "rd": frozenset(), "jobs": frozenset(), "rep": frozenset()}
NO_LED = {"st": "none", "held": frozenset(), "rep": frozenset(), "cnt": 0, "bad": frozenset()}
NO_JOB = {"kind": "none", "req": 0, "gen": 0, "sync": False, "epoch": 0, "items": frozenset()}
NO_TRACKER = {"gen": 0, "front": 0, "retry": frozenset(), "load": "none", "att": (0,)}
START = {
    "rst": ("none",), "rp": (("a",),), "rgen": (0,), "full": (0,), "tbl": ((0,),), "ref": (0, 0), "cached": ("none", "none"),
    "preempted": frozenset(), "owed": 0, "pipe": (NO_STEP,), "calm": False, "epoch": 0, "trk": (NO_TRACKER,), "nextJob": 1,
    "job": (NO_JOB,), "led": (NO_LED,), "known": frozenset(), "nohit": (False,), "stalled": False, "hooked": (0,), "polled": (0,),
    "fwd": (0,), "rk": (({"st": "none", "bad": frozenset()},),), "mem": ((("junk", 0), ("junk", 0)),), "dma": frozenset(),
    "store": ({("a", 0): ("none", 0)},),
}  # fmt: skip
WAITING = {**START, "rst": ("waiting",)}
SENT = {**NO_STEP, "on": True, "req": 1, "wr": frozenset({(1, "a")}), "jobs": frozenset({1})}
ADMITTED = {
    **START, "rst": ("running",), "rgen": (1,), "full": (1,), "tbl": ((1,),), "ref": (2, 0), "pipe": (SENT,), "nextJob": 2,
    "trk": ({**NO_TRACKER, "gen": 1, "front": 1},), "led": ({**NO_LED, "st": "live", "held": frozenset({1})},),
    "job": ({**NO_JOB, "kind": "store", "req": 1, "gen": 1, "items": frozenset({(1, 1, "a")})},),
}  # fmt: skip


@pytest.fixture
def adapter() -> LedgerAdapter:
    made = LedgerAdapter(START, BOUNDS)
    made.do("Arrive", START, WAITING)
    made.do("AdmitCompute", WAITING, ADMITTED)
    return made


def test_admission_leads_to_the_model_s_state(adapter):
    assert ledger_state.differences(adapter, ADMITTED) == []
    assert ledger_state.answers(adapter, ADMITTED) == []
    assert refusals.sweep(adapter, ADMITTED) > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ref": (1, 0)}, "block 1 has 2 references, held by kvledger, model 1"),
        ({"ref": (2, 1)}, "block 2 has 0 references, not held by kvledger, model 1"),
        ({"nextJob": 3}, "next job: 2, model 3"),
        ({"known": frozenset("a")}, "known stored: {}, model {'a'}"),
        ({"nohit": (True,)}, "requests whose hit failed"),
        ({"trk": ({**NO_TRACKER, "gen": 1, "front": 0},)}, "trackers"),
        ({"trk": ({**NO_TRACKER, "gen": 1, "front": 1, "att": (1,)},)}, "trackers"),
        ({"trk": ({**NO_TRACKER, "gen": 2, "front": 1},)}, "jobs"),
        ({"led": ({**NO_LED, "st": "live"},)}, "pins"),
        (
            {"led": ({**NO_LED, "st": "live", "held": frozenset({1}), "rep": frozenset({1})},)},
            "open jobs and who reported",
        ),
        ({"rk": (({"st": "queued", "bad": frozenset()},),)}, "jobs of ranks"),
        ({"rk": (({"st": "ready", "bad": frozenset()},),)}, "unread reports"),
        ({"store": ({("a", 0): ("a", 0)},)}, "found by a lookup"),
    ],
)
def test_every_difference_is_seen_and_named(adapter, change, told):
    (first, *_) = ledger_state.differences(adapter, {**ADMITTED, **change})
    assert told in first


def test_wrong_answers_to_core_are_seen(adapter, monkeypatch):
    monkeypatch.setattr(adapter.side, "has_pending_block_frees", lambda: True)
    assert ledger_state.answers(adapter, ADMITTED) == ["has_pending_block_frees: True, model False"]
    assert "core waits" in bad_states.wrong(adapter, ADMITTED, "NeverWaitsInVain")


def test_action_that_kvledger_refuses_is_a_divergence(adapter):
    adapter.do("RankAccept", {**ADMITTED, "hooked": (0,)}, {**ADMITTED, "hooked": (1,)})
    with pytest.raises(Divergence, match="RankAccept is refused: job told twice"):
        adapter.do("RankAccept", {**ADMITTED, "hooked": (0,)}, {**ADMITTED, "hooked": (1,)})


def test_unknown_action_is_a_divergence(adapter):
    with pytest.raises(Divergence, match="does not know the action Dance"):
        adapter.do("Dance", ADMITTED, ADMITTED)


def test_step_that_core_would_not_take_is_a_divergence():
    with pytest.raises(Divergence, match="core does not step"):
        LedgerAdapter(START, BOUNDS).do("EmptyStep", START, START)


def test_a_bound_does_not_pass_while_bytes_move(adapter):
    adapter.do("RankAccept", {**ADMITTED, "hooked": (0,)}, {**ADMITTED, "hooked": (1,)})
    queued, running, ready = (({"st": s, "bad": frozenset[int]()},) for s in ("queued", "running", "ready"))
    adapter.do("RankStart", {**ADMITTED, "rk": (queued,)}, {**ADMITTED, "rk": (running,)})
    moving = {**ADMITTED, "rk": (running,), "dma": frozenset({(1, 1, 1)})}
    with pytest.raises(Divergence, match="its bytes move"):
        adapter.do("RankExpire", moving, {**moving, "rk": (ready,)})
    adapter.do("RankExpire", {**moving, "dma": frozenset()}, {**moving, "rk": (ready,)})


def test_pool_refuses_to_free_what_nobody_holds():
    pool = Pool(2)
    pool.touch(pool.blocks[1:2])
    pool.free_blocks(pool.blocks[1:2])
    with pytest.raises(Divergence, match="block 1 is freed although nobody holds it"):
        pool.free_blocks(pool.blocks[1:2])


def test_store_keeps_the_first_object_and_answers_as_the_lookup_does():
    objects = Objects(ranks=2)
    objects.put(0, b"a", "", "first")
    objects.put(0, b"a", "", "second")
    assert objects.get(0, b"a", "") == "first"
    lookup = objects.ask([b"a", b"b"], "")
    assert (lookup.found, lookup.missed) == (0, b"a")  # the other rank has it not
    objects.put(1, b"a", "", "first")
    lookup = objects.ask([b"a", b"b"], "")
    assert (lookup.found, lookup.missed) == (1, b"b")
    assert objects.ask([b"a"], "later epoch").found == 0
