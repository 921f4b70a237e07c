"""Counterexamples of the wrong models: they stop on kvledger, and go through on kvledger with the same bug."""

import dataclasses
import json

import pytest

from conformance.refinement import bad_states, counterexamples, pages, two_sided
from conformance.refinement.twins import table as twins
from conformance.refinement.twins.in_adapter import LEDGER_PATCHES, OUT_OF_REACH
from conformance.refinement.world import Bounds
from conformance.tla import module, tlc
from conformance.tla.tlc import SPEC

EXAMPLES = counterexamples.load()
MUTANTS = [c.name for c in counterexamples.checks()]
MADE_ANEW = ("no-pins", "hit-offered-again", "reset-keeps-keys")
"""Short runs of TLC: the kept traces are those that it finds now."""


def test_kept_counterexamples_are_those_of_todays_model():
    assert counterexamples.stale(LEDGER_PATCHES) == []


def test_lengths_are_those_that_the_specification_records():
    """Of state properties: for them TLC's counterexample is the shortest one."""
    counts = json.loads((SPEC / "counts.json").read_text())
    kept = json.loads(counterexamples.FILE.read_text())
    shortest = [c.name for c in counterexamples.checks() if c.name in kept and not c.temporal]
    assert len(shortest) > 20
    assert {m: len(kept[m]["steps"]) for m in shortest} == {m: counts[m]["trace"] for m in shortest}


@pytest.mark.parametrize("mutant", MADE_ANEW)
def test_tlc_finds_the_kept_counterexample(mutant):
    kept = json.loads(counterexamples.FILE.read_text())[mutant]
    (check,) = (c for c in counterexamples.checks() if c.name == mutant)
    made = counterexamples.make(check)
    assert {k: v for k, v in made.items() if k != "steps"} == {k: v for k, v in kept.items() if k != "steps"}
    text = check.cfg_text()  # TLC prints the fields of a record in an order of its own
    assert counterexamples.read(mutant, made, text) == counterexamples.read(mutant, kept, text)


def test_every_mutant_is_replayed_or_has_a_reason():
    assert set(LEDGER_PATCHES) | set(OUT_OF_REACH) == set(MUTANTS)
    assert not set(LEDGER_PATCHES) & set(OUT_OF_REACH)


def test_what_cannot_be_replayed_is_killed_by_the_suite_or_by_the_model_alone():
    twinned = {m for t in twins.TWINS for m in t.mutant}
    assert set(OUT_OF_REACH) - set(twins.NOT_TWINNED) <= twinned


@pytest.mark.parametrize("mutant", LEDGER_PATCHES)
def test_counterexample_stops_on_the_good_code_and_goes_through_on_the_twin(mutant):
    good, twin = two_sided.both(EXAMPLES[mutant])
    assert not good.through, good.why
    assert 1 < good.step <= good.of
    assert good.why
    assert twin.through, f"{twin.step} of {twin.of}, {twin.action}: {twin.why}"
    assert twin.why


def test_a_twin_of_another_bug_does_not_make_it_go_through():
    """The replay is particular: only the bug that the counterexample is of lets it through."""
    with LEDGER_PATCHES["reset-keeps-keys"]():
        assert not two_sided.replay(EXAMPLES["no-pins"]).through


def test_end_that_is_no_bad_state_is_told():
    """Without its last step a counterexample goes along with the twin and breaks nothing."""
    example = EXAMPLES["no-pins"]
    with LEDGER_PATCHES["no-pins"]():
        outcome = two_sided.replay(dataclasses.replace(example, steps=example.steps[:4]))
    assert not outcome.through
    assert outcome.step == 4
    assert "holds in kvledger" in outcome.why


def test_every_property_of_a_replayed_mutant_is_evaluated_on_the_code():
    assert {EXAMPLES[m].breaks for m in LEDGER_PATCHES} == set(bad_states.CHECKS)


def test_bounds_are_read_from_the_configuration():
    text = "CONSTANTS\n  MaxPinned = 3\n  MaxAttempts = 0\n  MaxJob = 2\n  Depth = 2\n  DeferFree = TRUE\n  SyncLoads <- Sync\n"
    assert Bounds.read(text) == Bounds(max_pinned=3, max_attempts=0, max_job=2, depth=2, defer_free=True, sync=True)


def test_fingerprint_is_of_what_a_mutant_uses_and_of_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tlc, "FOLDERS", (tmp_path,))

    def fingerprint(base: str, more: str) -> str:
        module.known.cache_clear()
        (tmp_path / "Base.tla").write_text(f"---- MODULE Base ----\nEXTENDS Naturals\nVARIABLE x\n{base}\n====\n")
        (tmp_path / "More.tla").write_text(f"---- MODULE More ----\nEXTENDS Base\n{more}\n====\n")
        return counterexamples.model_fingerprint("More", "SPECIFICATION Spec\nCONSTANTS\n  A <- B\n")

    try:
        plain = fingerprint("A == 1\nSpec == C(A)\nC(y) ==\n  y + 1", "B == 2")
        assert plain == fingerprint(
            "A==1 (* a (* b *) *)\nSpec == C(A)\nC(y) == \\* c\n  y+1\nUnused == 9", "B == 2\nOther == 3"
        )
        assert plain != fingerprint("A == 1\nSpec == C(A)\nC(y) ==\n  y + 2", "B == 2")
        assert plain != fingerprint("A == 1\nSpec == C(A)\nC(y) ==\n  y + 1", "B == 3")
    finally:
        module.known.cache_clear()


def test_page_and_summary():
    rows = two_sided.rows(("no-pins", "store-before-fence"))
    page = pages.two_sided(rows)
    assert (
        "| `no-pins` | vllm#52360 | `PinnedNotFreed` | 3 of 8, AdmitCompute: block 1 has 2 references, held by kvledger"
        in page
    )
    assert "2 mutants, 1 replayed: 1 stop" in page
    assert "not replayed: the compute fence is in the worker" in page
    slices = [{"name": "x", "states": 2, "edges": 3, "edges_covered": 3, "steps": 4, "refusals": 5, "failure": ""}]
    summary = pages.summary([{"two_sided": rows}, {"slices": slices}, {"traces": [{"accepted": False, "events": 7}]}])
    assert (
        "| two-sided bugs | 1 of 2 counterexamples replayed | 1 stop on the good code and go through on the twin |"
        in summary
    )
    assert "| tours on the model's graph | 1 slices, 2 states, 3 edges | 3 edges covered in 4 steps |" in summary
    assert "| recordings of engine runs | 1 recordings, 7 events | 0 accepted, 1 rejected |" in summary
