"""Recording: complete when on, absent when off, harmless when it fails."""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

from demo.faults import Fault
from kvledger.observe.trace import TraceRecorder
from tests.support.live import live_engine

PROMPT = list(range(100, 120))


def test_recording_tells_every_job_from_its_emission_to_its_release(store, tmp_path):
    with live_engine(store, ranks=2, trace_dir=str(tmp_path), retry_backoff_s=0.01) as engine:
        engine.clients["rank1"].add(Fault(operation="put", call=1, code=-600))
        for name in "abc":
            engine.add(name, PROMPT, max_tokens=30)
        engine.run_to_idle()
        engine.assert_right()

    events = recorded(tmp_path)

    assert [e["seq"] for e in events] == list(range(len(events)))
    assert events[0]["action"] == "Header"
    emitted = {e["job"]: e["blocks"] for e in events if e["action"] == "EmitStore" and e["job"] is not None}
    released = {e["job"]: e["blocks"][::-1] for e in events if e["action"] == "Release"}
    assert emitted == released
    for job in emitted:
        assert sorted(e["rank"] for e in events if e["action"] == "ApplyReport" and e["job"] == job) == [0, 1]
    assert any(e["action"] == "ApplyReport" and e["result"] == "FAILED" for e in events)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The events of an engine that has been closed."""
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_failed_synchronous_load_tells_whom_it_taints_and_what_leaves_the_cache(store, tmp_path):
    facts: dict[str, Any] = {"cache_prefix": "taints", "load_async": False}
    with live_engine(store, **facts) as cold:
        cold.add("a", PROMPT)
        cold.run_to_idle()
    with live_engine(store, trace_dir=str(tmp_path), **facts) as engine:
        engine.clients["rank0"].add(Fault(operation="get", call=1, code=-704, positions=frozenset({2})))
        engine.add("a", PROMPT)
        engine.add("sharer", [*PROMPT, *range(200, 220)])
        engine.run_to_idle()
        engine.assert_right()

    events = recorded(tmp_path)

    tables = {e["req"]: e["table"] for e in events if e["action"] == "BeginGeneration"}
    begins = [e for e in events if e["action"] == "BeginGeneration"]
    assert all(len(e["hashes"]) == 5 for e in begins if e["req"] == "a")  # one per full block of the prompt
    (load,) = (e for e in events if e["action"] == "EmitLoad")
    (report,) = (e for e in events if e["action"] == "ApplyReport" and e["job"] == load["job"])
    assert load["sync"]
    assert (report["bad"], report["tainted"]) == ([2], ["sharer", "a"])
    at = events.index(report)
    assert [e["action"] for e in events[at + 1 : at + 4]] == ["Forget", "EvictTainted", "EvictTainted"]
    assert events[at + 1]["names"] == [load["names"][2]]
    evicted = {e["req"]: e["blocks"] for e in events[at + 2 : at + 4]}
    assert evicted == {r: table[2:] for r, table in tables.items()}


def test_request_that_ends_while_it_waits_is_told(store, tmp_path):
    with live_engine(store, trace_dir=str(tmp_path)) as engine:
        engine.add("a", PROMPT)
        engine.abort("a")
        engine.run_to_idle()
    assert [e["action"] for e in recorded(tmp_path)] == ["Header", "EndRequest"]


def test_store_that_is_left_alone_fills_no_recording(store, tmp_path):
    """Under backoff each step tries again and changes nothing."""
    with live_engine(store, trace_dir=str(tmp_path), retry_backoff_s=60.0, max_store_attempts=9) as engine:
        engine.clients["rank0"].add(Fault(operation="put", call=1, code=-200))
        engine.add("a", PROMPT, max_tokens=30)
        engine.run_to_idle()

    stores = [e for e in recorded(tmp_path) if e["action"] == "EmitStore"]

    assert engine.steps > 30
    states = [(e["job"], e["frontier"], e["retry"]) for e in stores]
    assert all(one != other for one, other in itertools.pairwise(states))
    assert len(stores) < engine.steps / 3


def test_nothing_is_written_by_default(store):
    with live_engine(store) as engine, mock.patch.object(TraceRecorder, "record") as record:
        engine.add("a", PROMPT)
        engine.run_to_idle()
    assert not record.called


def test_recorder_that_fails_is_removed_and_does_no_harm(tmp_path, caplog):
    recorder = TraceRecorder(str(tmp_path))
    recorder.record("Bad", value=object())
    recorder.record("After")
    assert [json.loads(line)["action"] for line in recorder.path.read_text().splitlines()] == ["Header"]
    assert "recording stopped" in caplog.text
