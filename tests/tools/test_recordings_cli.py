"""`./dev trace run` and the set it makes, without making it."""

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.recordings import record, recorded
from conformance.recordings.check import Verdict
from conformance.recordings.faulty import scripted
from conformance.recordings.recording import Event
from conformance.recordings.scenarios import SCENARIOS, StoreFault, by_name


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        record.parse(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_set_covers_what_is_promised() -> None:
    names = [s.name for s in SCENARIOS]
    assert len(set(names)) == len(names) >= 10
    assert sum(s.tensor_parallel == 2 for s in SCENARIOS) >= 2
    promised = {name for s in SCENARIOS for name in s.must}
    wanted = """preempted aborted_running aborted_loading refused loads_failed sync_loads_failed reset_while_loading
    failed_stores indeterminate_stores two_ranks sharers_tainted"""
    assert set(wanted.split()) <= promised


def test_names_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no recording is called 'strom'" in refusal(capsys, "traces", "--only", "storm,strom")
    assert "either --all or --only" in refusal(capsys, "traces")
    assert "either --all or --only" in refusal(capsys, "traces", "--all", "--only", "storm")
    assert record.parse(["traces", "--only", "storm,resets"]).names == ["storm", "resets"]


def test_faults_hit_the_calls_and_the_rank_they_are_meant_for() -> None:
    (fault,) = by_name("sync-load-failures-tp2").faults
    assert fault == StoreFault("get", first=2, every=3, code=-704, rank=1)
    assert scripted(by_name("sync-load-failures-tp2"), rank=0) == []
    calls = scripted(by_name("sync-load-failures-tp2"), rank=1)
    assert [f.call for f in calls[:3]] == [2, 5, 8]
    assert {(f.operation, f.code) for f in calls} == {("get", -704)}


def test_a_negative_control_is_right_only_if_its_rule_rejects_it() -> None:
    good, wrong = by_name("storm"), by_name("early-release")
    accepted = Verdict(Path("storm"), 9, accepted=True)
    rejected = Verdict(Path("storm"), 9, accepted=False, at=7, broken=("PinnedNotFreed",))
    assert record.judged(good, accepted) == ("accepted", True)
    assert record.judged(good, rejected) == ("REJECTED at 7", False)
    assert record.judged(wrong, accepted) == ("ACCEPTED, WRONGLY", False)
    assert record.judged(wrong, rejected) == ("rejected at 7", True)
    assert record.judged(wrong, replace(rejected, broken=("OwedFirst",))) == ("REJECTED at 7", False)


def test_facts_count_what_happened() -> None:
    begin = {"action": "BeginGeneration", "req": "a", "gen": 1}
    store = {"action": "EmitStore", "req": "a", "gen": 1, "table": [4, 5], "retry": []}
    report = {"action": "ApplyReport", "job": 1, "rank": 0}
    events: list[Event] = [
        {"action": "Header", "ranks": 1},
        begin,
        store | {"job": 1, "blocks": [4, 5]},
        report | {"result": "FAILED", "bad": [1], "retry": [1]},
        store | {"job": None, "blocks": [], "retry": [1]},
        store | {"job": 2, "blocks": [5]},
        {"action": "EndGeneration", "req": "a", "why": "finished"},
        begin | {"gen": 2},
        report | {"job": 2, "result": "DONE", "bad": [], "retry": []},
        {"action": "EmitLoad", "req": "a", "job": 3, "sync": True},
        report | {"job": 3, "result": "INDETERMINATE", "bad": [0], "retry": [], "tainted": ["a", "b"]},
        {"action": "EvictTainted", "req": "a", "blocks": [5]},
        {"action": "Reset", "loading": []},
    ]
    seen = +recorded.facts(events)
    assert seen == {
        "events": 12,
        "ranks": 1,
        "failed_stores": 1,
        "stores_done": 1,
        "late_stores": 1,
        "retried": 1,
        "ids_reused": 1,
        "sync_loads_failed": 1,
        "tainted": 2,
        "sharers_tainted": 1,
        "evicted": 1,
        "reset": 1,
    }
