"""A reset that vLLM refuses because a block is in use: it keeps its prefix cache and tells the connector all the same.

What it still holds may be of other weights, so nothing of it may reach the store under the keys of the new epoch.
"""

import pytest

from demo.faults import Fault, Gate
from tests.support.live import LiveEngine

PROMPT = list(range(100, 120))


@pytest.fixture
def refused(engines) -> LiveEngine:
    """An engine whose request "a" runs, its prompt is stored, and a reset was refused because of it."""
    engine: LiveEngine = engines()
    engine.add("a", PROMPT, max_tokens=40)
    engine.run(lambda: engine.requests["a"].num_output_tokens >= 2)
    assert all(rank.connector.rank_side.wait_idle(30) for rank in engine.ranks)  # no steps meanwhile
    engine.run(lambda: not engine.connector.has_pending_push_work())
    assert engine.stored_keys()
    assert not engine.requests["a"].is_finished()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    return engine


def test_blocks_that_core_kept_are_not_stored_under_the_new_epoch(refused):
    """ "b" hits what "a" computed before the reset; a new request that shares nothing is not stored either."""
    before = set(refused.stored_keys())
    refused.add("b", [*PROMPT, *range(300, 308)])
    refused.add("c", list(range(500, 520)))
    refused.step()
    tables = [refused.scheduler.kv_cache_manager.get_block_ids(r)[0] for r in "ab"]
    assert tables[0][0] == tables[1][0]
    refused.run_to_idle()
    assert set(refused.stored_keys()) == before
    refused.assert_right()


def test_storing_resumes_once_a_reset_succeeds(refused):
    before = set(refused.stored_keys())
    refused.run_to_idle()
    assert refused.scheduler.reset_prefix_cache(reset_connector=True)
    refused.add("b", PROMPT)
    refused.run_to_idle()
    assert len(set(refused.stored_keys()) - before) == len(PROMPT) // refused.shape.block_size
    refused.assert_right()


def test_a_second_refusal_changes_nothing(refused):
    before = set(refused.stored_keys())
    assert refused.scheduler.reset_prefix_cache(reset_connector=True) is False
    refused.add("b", [*PROMPT, *range(300, 308)])
    refused.run_to_idle()
    assert set(refused.stored_keys()) == before


def test_nothing_is_looked_up_meanwhile(refused):
    """Blocks under the new keys can only be another engine's; what this one holds beside them may not fit them."""
    asked = refused.connector.snapshot()["lookups"]
    refused.add("c", list(range(500, 520)))
    refused.run_to_idle()
    assert refused.connector.snapshot()["lookups"] == asked
    assert refused.connector.snapshot()["hit_tokens"] == 0


def test_pins_of_a_store_in_flight_refuse_a_reset_too(engines):
    engine = engines()
    held = Gate()
    engine.clients["rank0"].add(Fault(operation="exists", gate=held))
    engine.add("a", PROMPT, max_tokens=2)
    engine.run(engine.requests["a"].is_finished)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    held.open()
    engine.run_to_idle()
    before = set(engine.stored_keys())
    engine.add("b", [*PROMPT, *range(300, 308)])
    engine.run_to_idle()
    assert set(engine.stored_keys()) == before
    engine.assert_right()
