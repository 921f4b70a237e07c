"""A synchronous load that fails, of a request that vLLM aborts between the end of the step and its output.

vLLM hashes the targets when it plans the load, and frees them with the request before it hears that nothing arrived: the
next request with the prompt would hit blocks that nobody has filled.
"""

import pytest

from demo.faults import Fault
from tests.support.live import LiveEngine

PROMPT = list(range(100, 120))


@pytest.fixture
def failing(engines) -> LiveEngine:
    """An engine whose loads are synchronous and fail, the prompt being stored."""
    cold: LiveEngine = engines()
    cold.add("cold", PROMPT)
    cold.run_to_idle()
    engine: LiveEngine = engines(load_async=False)
    engine.clients["rank0"].add(Fault(operation="get", code=-704))
    return engine


@pytest.mark.parametrize("aborted", [["a"], ["a", "sharer"], ["sharer"]])
def test_blocks_that_rest_on_it_are_not_hit(failing, aborted):
    """Also those of a request that was admitted on the same blocks in the same step."""
    failing.add("a", PROMPT)
    failing.add("sharer", [*PROMPT, *range(300, 308)])
    failing.aborting += aborted
    failing.step()
    failing.add("next", [*PROMPT, *range(300, 312)])
    failing.run(failing.requests["next"].is_finished)
    failing.run_to_idle()
    failing.assert_idle()
    assert failing.poisoned() == []
    assert failing.found == []
