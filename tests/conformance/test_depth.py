"""Two steps in flight: the order is vLLM's, forwards run late, events wait for them, and W-03 is seen on vLLM's own connector."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from kvledger_conformance.engine import compat
from kvledger_conformance.engine.stream import Event, Stream, on, recorded
from kvledger_conformance.suite import targets
from kvledger_conformance.suite.driver import driving, replay
from kvledger_conformance.suite.scenarios import SCENARIOS

TWO = compat.Shape(depth=2)


class TestStream:
    def test_event_is_done_when_what_was_launched_before_it_has_run(self):
        stream, ran = Stream(), []
        stream.launch(lambda: ran.append(1))
        with on(stream):
            event = recorded()
        stream.launch(lambda: ran.append(2))
        assert not event.query()
        event.synchronize()  # on the main thread the stream catches up, and no further
        assert ran == [1]
        assert event.query()

    def test_another_thread_sleeps_until_the_forward_has_run(self):
        stream = Stream()
        number = stream.launch(lambda: None)
        with on(stream):
            event = recorded()
        with ThreadPoolExecutor() as other:
            waiting = other.submit(event.synchronize)
            assert not waiting.done()
            stream.run_to(number)
            waiting.result(10)

    def test_event_that_was_never_recorded_is_done(self):
        assert Event().query()


def test_core_schedules_a_step_before_it_has_the_output_of_the_one_before():
    calls = Mock()
    with driving(targets.find("kvledger"), TWO) as driver:
        core = driver.engine.scheduler
        for hook in ("schedule", "update_from_output"):
            calls.attach_mock(Mock(wraps=getattr(core, hook)), hook)
            setattr(core, hook, getattr(calls, hook))
        driver.do("add", name="a", blocks="a", tail=1, tokens=6)
        driver.do("steps", count=3)
        assert len(driver.engine.flights) == 1
        driver.do("finish")
    seen = [name for name, *_ in calls.mock_calls]
    assert seen[:5] == ["schedule", "schedule", "update_from_output", "schedule", "update_from_output"]
    assert seen.count("schedule") == seen.count("update_from_output")


def test_request_that_stops_leaves_a_step_in_flight():
    with driving(targets.find("kvledger"), TWO) as driver:
        driver.do("add", name="a", blocks="a", tail=1, tokens=8, stop=2)
        driver.do("steps", count=3)
        request = driver.engine.requests["a"]
        assert request.is_finished()
        assert len(request.output_token_ids) == 2
        assert [list(f.output.num_scheduled_tokens) for f in driver.engine.flights] == [["a"]]
        driver.do("finish")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # how its threads are ended
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.source.startswith("W-03")], ids=lambda s: s.name)
def test_vllms_own_connector_as_a_producer_loads_into_a_block_that_is_still_written(scenario):
    """W-03, on the installed release; with role kv_both core defers the block, and nothing happens."""
    violation = replay(targets.find("vllm"), scenario.shape, scenario.script)
    assert (violation and violation.name) == (None if scenario.shape.role == "kv_both" else "load-errors-complete")
