"""Recording: complete when on, absent when off, harmless when it fails."""

import json
from collections.abc import Iterator

import pytest

from kvledger.mooncake.embedded import EmbeddedStore, running_embedded
from kvledger.mooncake.faults import Fault
from kvledger.observe.trace import TraceRecorder
from tests.support.engine import make_engine

PROMPT = list(range(100, 120))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[EmbeddedStore]:
    with running_embedded(tmp_path_factory.mktemp("store"), 64 << 20) as running:
        yield running


def test_recording_tells_every_job_from_its_emission_to_its_release(store, tmp_path):
    folder = tmp_path / "traces"
    engine = make_engine(tmp_path / "model", store, ranks=2, trace_dir=str(folder), retry_backoff_s=0.01)
    engine.ranks[1].connector.store.add(Fault(operation="put", call=1, code=-600))
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=30)
    engine.run_to_idle()
    engine.assert_right()
    engine.close()

    (path,) = folder.iterdir()
    events = [json.loads(line) for line in path.read_text().splitlines()]

    assert [e["seq"] for e in events] == list(range(len(events)))
    assert events[0]["action"] == "Header"
    emitted = {e["job"]: e["blocks"] for e in events if e["action"] == "EmitStore" and e["job"] is not None}
    released = {e["job"]: e["blocks"][::-1] for e in events if e["action"] == "Release"}
    assert emitted == released
    for job in emitted:
        assert sorted(e["rank"] for e in events if e["action"] == "ApplyReport" and e["job"] == job) == [0, 1]
    assert any(e["action"] == "ApplyReport" and e["result"] == "FAILED" for e in events)


def test_nothing_is_written_by_default(store, tmp_path):
    engine = make_engine(tmp_path / "model", store)
    assert engine.connector.scheduler_side._trace is None
    engine.close()


def test_recorder_that_fails_is_removed_and_does_no_harm(tmp_path, caplog):
    recorder = TraceRecorder(str(tmp_path))
    recorder.record("Bad", value=object())
    recorder.record("After")
    assert [json.loads(line)["action"] for line in recorder.path.read_text().splitlines()] == ["Header"]
    assert "recording stopped" in caplog.text
