"""vLLM's real scheduler and block pool, the real connector, a real store: what must hold whatever vLLM does."""

import functools
import os
import signal
import threading
import time
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from demo.faults import Fault, Gate, Operation
from kvledger.mooncake.embedded import running_embedded
from tests.support.live import LiveEngine, live_engine

PROMPT_A = list(range(100, 120))
PROMPT_B = list(range(200, 220))


def filled(engines, **facts) -> LiveEngine:
    """An idle engine that has served prompt A, and stored it."""
    engine: LiveEngine = engines(**facts)
    engine.add("a", PROMPT_A)
    engine.run_to_idle()
    return engine


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("mode", "load_async"), [("staged", True), ("staged", False), ("direct", True)])
def test_second_engine_serves_the_prompts_from_the_store(engines, ranks, load_async, mode):
    cold = filled(engines, ranks=ranks, load_async=load_async, transfer_mode=mode)
    cold.assert_right()
    warm = engines(ranks=ranks, load_async=load_async, transfer_mode=mode)

    warm.add("a", PROMPT_A)
    warm.add("longer", PROMPT_A + PROMPT_B)
    warm.run_to_idle()

    warm.assert_right()
    # A synchronous load's blocks are shareable in the same step, so the longer prompt finds the first one's locally.
    assert warm.connector.snapshot()["hit_tokens"] == (16 + 20 if load_async else 16)
    assert len(cold.stored_keys()) == 10 * ranks


def hold(engine: LiveEngine, operation: Operation, *, rank: int = 0, call: int | None = None) -> Gate:
    """Hold this rank's calls of an operation."""
    held = Gate()
    client = engine.clients[f"rank{rank}"]
    client.add(Fault(operation=operation, call=None if call is None else client.calls(operation) + call, gate=held))
    return held


def preempt(engine: LiveEngine, request_id: str) -> None:
    """Preempt one running request as the scheduler does when blocks run out."""
    scheduler = engine.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=False)


def test_core_does_not_spin_while_a_load_is_all_that_it_waits_for(engines):
    filled(engines)
    warm = engines()
    held = hold(warm, "get")
    warm.add("a", PROMPT_A)
    warm.run(held.reached.is_set)
    threading.Timer(0.5, held.open).start()
    before = warm.steps

    while warm.busy:
        warm.step()

    assert warm.steps - before < 400  # without a wait thousands: each takes a fraction of a millisecond
    warm.assert_right()


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_blocks_of_a_preempted_request_are_not_reused_while_a_rank_still_reads_them(engines, slow_rank):
    """vLLM #52360: the pool must not hand the blocks out before every rank's completion was consumed."""
    engine = engines(ranks=2, num_blocks=12, max_num_seqs=1, max_pinned_blocks=8)
    held = hold(engine, "exists", rank=slow_rank)
    engine.add("a", PROMPT_A, max_tokens=8)
    engine.step()
    mine = engine.scheduler.kv_cache_manager.get_block_ids("a")[0][:5]
    assert held.reached.wait(10)
    preempt(engine, "a")

    free = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())

    assert not {b.block_id for b in free} & set(mine)
    for rank in engine.ranks:
        rank.spoil([b.block_id for b in free])
    engine.pool.free_blocks(free)
    held.open()
    engine.run_to_idle()
    engine.assert_right()


def test_late_result_of_an_older_generation_under_the_same_id(engines):
    """vLLM #51637: store held, preempt, resume under the same id, finish; then a new request reuses the id."""
    engine = engines(ranks=2, num_blocks=40)
    held = hold(engine, "exists", rank=1, call=1)
    engine.add("x", PROMPT_A, max_tokens=6)
    engine.step()
    preempt(engine, "x")
    engine.run(engine.requests["x"].is_finished)
    assert engine.connector.snapshot()["open_jobs"] >= 1
    engine.add("x", PROMPT_B, max_tokens=6)
    engine.run(engine.requests["x"].is_finished)
    held.open()
    engine.run_to_idle()
    engine.assert_right()


@pytest.mark.parametrize("stored", [True, False])
def test_same_step_resume_after_a_reset_of_running_requests(engines, stored):
    """vLLM lists the request as preempted after it re-admitted it; the new generation must survive (contract G7)."""
    engine = engines(ranks=2, enable_lookup=True)
    if stored:
        engine.add("warm", PROMPT_A)
        engine.run_to_idle()
    engine.add("a", PROMPT_A, max_tokens=40)
    engine.run(lambda: engine.requests["a"].num_output_tokens >= 2)
    assert all(rank.connector.rank_side.wait_idle(30) for rank in engine.ranks)
    engine.run(lambda: not engine.connector.has_pending_push_work())

    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = engine.step()

    assert "a" in output.preempted_req_ids
    assert engine.connector.snapshot()["generations"] == 1
    engine.run_to_idle()
    engine.assert_right()


def test_reset_while_a_store_is_in_flight_fails_but_harms_nothing(engines):
    """vLLM checks the pool before it asks the connector, so pins make the reset raise; the engine must go on."""
    engine = engines(ranks=1)
    held = hold(engine, "exists")
    engine.add("a", PROMPT_A, max_tokens=8)
    engine.step()
    with pytest.raises(RuntimeError, match="reset"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    held.open()
    engine.run_to_idle()
    engine.assert_right()


def test_preemption_storm_in_a_small_pool_behind_a_slow_store(engines):
    engine = engines(ranks=2, num_blocks=14, max_num_seqs=6, save_decode_cache=True, max_pinned_blocks=7)
    for rank in engine.ranks:
        engine.clients[f"rank{rank.index}"]._delay_s = 0.003 * (rank.index + 1)
    for i in range(12):
        engine.add(f"r{i}", PROMPT_A[: 4 + i] + [300 + i] * 3, max_tokens=16)
    engine.run_to_idle(timeout_s=60)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert engine.connector.snapshot()["store_jobs"]["done"] > 0
    engine.assert_right()


@pytest.mark.parametrize("stall_timeout_s", [0.001, 5.0])
def test_decoding_over_the_pool_while_the_store_hangs_for_a_while(engines, stall_timeout_s):
    """vLLM waits for pins instead of preempting only while reports come, and goes on either way."""
    engine = engines(num_blocks=14, max_num_seqs=6, max_pinned_blocks=7, stall_timeout_s=stall_timeout_s)
    engine.clients["rank0"]._delay_s = 0.05
    for i in range(8):
        engine.add(f"r{i}", [600 + i] * 9, max_tokens=16)
    engine.run_to_idle(timeout_s=60)
    engine.assert_right()


def test_preempted_requests_find_in_the_store_what_their_own_jobs_saved(engines):
    """A preempted request's queued jobs still run: its resume loads instead of recomputing."""
    engine = engines(num_blocks=40)
    held = hold(engine, "exists", call=1)
    engine.add("a", PROMPT_A, max_tokens=6)
    engine.step()
    assert held.reached.wait(10)
    preempt(engine, "a")
    mine = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())  # the local cache forgets the freed blocks
    engine.pool.free_blocks(mine)
    held.open()
    engine.run_to_idle()
    assert engine.connector.snapshot()["store_jobs"]["done"] == 1
    engine.assert_right()


class TestAcceptedTokens:
    @pytest.mark.parametrize("accepted", range(17))
    def test_core_may_accept_any_number_up_to_what_was_offered(self, engines, accepted):
        filled(engines)
        warm = engines()
        connector = warm.connector
        offer = connector.get_num_new_matched_tokens

        def lowered(request, computed):
            tokens, load_async = offer(request, computed)
            if tokens is None:
                return tokens, load_async
            assert tokens == 16
            return accepted, load_async and accepted > 0

        connector.get_num_new_matched_tokens = lowered
        warm.add("a", PROMPT_A)
        warm.run_to_idle()
        warm.assert_right()
        assert warm.connector.snapshot()["hit_tokens"] == accepted

    def test_prompt_that_is_stored_whole_leaves_a_token_to_compute(self, engines):
        cold = engines()
        cold.add("a", PROMPT_A[:16])
        cold.run_to_idle()
        warm = engines()
        for length in (1, 3, 4, 5, 15, 16, 17):
            warm.add(f"n{length}", PROMPT_A[:length] if length < 17 else [*PROMPT_A[:16], 7])
            warm.run_to_idle()
        warm.assert_right()


class TestFailedLoads:
    @pytest.mark.parametrize("load_async", [True, False])
    @pytest.mark.parametrize("bad_block", [0, 2])
    @pytest.mark.parametrize("bad_rank", [0, 1])
    def test_lost_key_costs_a_recomputation_once(self, engines, load_async, bad_block, bad_rank):
        filled(engines, ranks=2)
        warm = engines(ranks=2, load_async=load_async)
        warm.clients[f"rank{bad_rank}"].add(Fault(operation="get", code=-704, positions=frozenset({bad_block})))
        warm.add("a", PROMPT_A)
        warm.run_to_idle()
        warm.assert_right()
        snapshot = warm.connector.snapshot()
        assert snapshot["loads_accepted"] == 1
        assert snapshot["load_jobs"]["failed"] == 1

    @pytest.mark.parametrize("fault", [{"code": -800, "transfer": True}, {"error": RuntimeError("get broke")}])
    def test_load_that_raises_or_never_ends_is_recomputed(self, engines, fault):
        filled(engines)
        warm = engines()
        warm.clients["rank0"].add(Fault(operation="get", **fault))
        warm.add("a", PROMPT_A)
        warm.run_to_idle()
        warm.assert_right()

    def test_requests_that_share_a_failed_synchronous_load_store_nothing_wrong(self, engines):
        filled(engines)
        warm = engines(load_async=False)
        warm.clients["rank0"].add(Fault(operation="get", call=1, code=-704))
        warm.add("a", PROMPT_A)
        warm.add("b", PROMPT_A + PROMPT_B)  # admitted in the same step, on blocks whose bytes never arrive
        warm.run_to_idle()
        warm.assert_right()

    @pytest.mark.parametrize("end", ["preempt", "abort"])
    def test_blocks_of_a_failed_synchronous_load_are_no_local_hit(self, engines, end):
        """Core hashes the targets when it plans the load and, under `recompute`, leaves the hashes in when it fails."""
        filled(engines, ranks=2)
        warm = engines(ranks=2, load_async=False)
        warm.clients["rank1"].add(Fault(operation="get", call=1, code=-704, positions=frozenset({3})))
        warm.add("a", PROMPT_A, max_tokens=8)
        warm.add("sharer", PROMPT_A + PROMPT_B)
        warm.step()
        for request_id in ("sharer", "a"):
            preempt(warm, request_id) if end == "preempt" else warm.abort(request_id)
        warm.add("next", PROMPT_A + PROMPT_B)
        warm.run_to_idle()
        warm.assert_right()

    def test_aborted_load_gives_its_blocks_back(self, engines):
        filled(engines, ranks=2)
        warm = engines(ranks=2)
        held = hold(warm, "get", rank=1)
        warm.add("a", PROMPT_A)
        warm.run(lambda: warm.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS)
        warm.abort("a")
        for _ in range(5):
            warm.step()
        assert any(b.ref_cnt for b in warm.pool.blocks if not b.is_null)
        held.open()
        warm.run_to_idle()
        warm.assert_right()


class TestStoreTrouble:
    def test_full_store_costs_hits_only(self, engines):
        engine = engines(retry_backoff_s=0.01)
        engine.clients["rank0"].add(Fault(operation="put", code=-200))
        engine.add("a", PROMPT_A, max_tokens=16)
        engine.add("b", PROMPT_B, max_tokens=16)
        engine.run_to_idle()
        snapshot = engine.connector.snapshot()
        assert snapshot["store_jobs"]["refused"] > 0
        engine.assert_right()
        assert engine.stored_keys() == []

    @pytest.mark.parametrize("operation", ["exists", "put"])
    def test_store_client_that_raises_costs_hits_only(self, engines, operation):
        engine = engines(ranks=2)
        engine.clients["rank1"].add(Fault(operation=operation, error=RuntimeError("broke")))
        engine.add("a", PROMPT_A, max_tokens=8)
        engine.run_to_idle()
        engine.assert_right()

    def test_failed_store_is_retried_while_the_request_lives(self, engines):
        engine = engines(retry_backoff_s=0.01)
        engine.clients["rank0"].add(Fault(operation="put", call=1, code=-600))
        engine.add("a", PROMPT_A, max_tokens=40)
        engine.run(lambda: len(engine.stored_keys()) == 5)
        engine.run_to_idle()
        engine.assert_right()

    def test_pins_never_starve_a_full_length_request_while_the_store_hangs(self, engines):
        engine = engines(stall_timeout_s=0.05)
        held = hold(engine, "exists")
        for i in range(6):
            engine.add(f"r{i}", [400 + i] * 30, max_tokens=20)
        engine.add("long", list(range(50)), max_tokens=14)
        engine.run(lambda: all(r.is_finished() for r in engine.requests.values()))
        assert engine.connector.snapshot()["blocks_pinned"] > 0
        assert engine.connector.snapshot()["blocks_pinned_max"] <= 16
        held.open()
        engine.run_to_idle()
        engine.assert_right()

    def test_dead_master_costs_hits_only_and_no_long_wait(self, tmp_path):
        bounds: dict[str, Any] = {"lookup_wait_s": 0.01, "lookup_timeout_s": 0.5, "breaker_open_s": 30.0}
        with (
            running_embedded(tmp_path / "store", 32 << 20) as store,
            live_engine(store, ranks=2, **bounds) as engine,
        ):
            engine.add("a", PROMPT_A, max_tokens=8)
            engine.run_to_idle()
            os.kill(store.master_pid, signal.SIGKILL)
            for i in range(8):
                engine.add(f"r{i}", [500 + i] * 20, max_tokens=20)
                engine.run(functools.partial(lambda r: engine.requests[r].is_finished(), f"r{i}"))
            engine.run_to_idle(timeout_s=90)
            engine.assert_outputs()
            engine.assert_idle()
            assert engine.slowest_step_s < 3.0  # one call to a dead master takes more than 4 s
            assert engine.connector.snapshot()["store_jobs"]["failed"] > 0


class TestLookups:
    def silence(self, engine: LiveEngine) -> Gate:
        held = Gate()
        engine.clients["lookup"].add(Fault(operation="exists", gate=held))
        return held

    def test_silent_store_is_a_miss_after_the_bound_and_never_holds_up_a_step(self, engines):
        engine = engines(lookup_wait_s=0.01, lookup_timeout_s=3.0)
        held = self.silence(engine)
        for i in range(20):
            engine.add(f"r{i}", [500 + i] * 20)
        engine.run(lambda: all(r.is_finished() for r in engine.requests.values()))
        assert engine.slowest_step_s < 1.5  # half of what one blocking lookup would take
        assert engine.connector.snapshot()["lookups"]["timed_out"] > 0
        held.open()
        engine.run_to_idle()
        engine.assert_right()

    def test_waiting_request_is_looked_up_once(self, engines):
        engine = engines(num_blocks=12, max_num_seqs=1)
        engine.add("first", PROMPT_B, max_tokens=20)
        engine.add("waiting", PROMPT_A)
        engine.run_to_idle()
        assert engine.connector.snapshot()["lookups"]["asked"] == 2
        engine.assert_right()

    def test_abort_before_the_answer_leaves_nothing(self, engines):
        engine = engines(lookup_wait_s=0.0)
        held = self.silence(engine)
        engine.add("a", PROMPT_A)
        engine.step()
        engine.abort("a")
        engine.run_to_idle()
        held.open()
        engine.assert_idle()

    def test_only_blocks_beyond_the_local_hit_are_probed(self, engines):
        engine = filled(engines)
        probed = engine.connector.snapshot()["lookups"]["keys"]
        engine.add("b", PROMPT_A + PROMPT_B)
        engine.run_to_idle()
        assert engine.connector.snapshot()["lookups"]["keys"] - probed == 4
        engine.assert_right()

    def test_hit_ends_before_a_block_that_one_rank_lacks(self, engines):
        cold = filled(engines, ranks=2)
        gone = cold.requests["a"].block_hashes[2].hex()
        key = next(k for k in cold.stored_keys() if f"@r1@g0@{gone}" in k)
        assert cold.clients["rank1"].remove_by_prefix(key) == 1
        warm = engines(ranks=2)
        warm.add("a", PROMPT_A)
        warm.run_to_idle()
        assert warm.connector.snapshot()["hit_tokens"] == 8
        warm.assert_right()

    def test_lookup_that_raises_is_a_miss_and_the_next_one_works(self, engines):
        filled(engines)
        warm = engines()
        warm.clients["lookup"].add(Fault(operation="exists", call=1, error=RuntimeError("broke")))
        warm.add("a", PROMPT_B)
        warm.add("b", PROMPT_A)
        warm.run_to_idle()
        assert warm.connector.snapshot()["hit_tokens"] == 16
        warm.assert_right()


def test_block_is_stored_only_once_for_requests_that_share_it(engines):
    engine = engines()
    for name in "abc":
        engine.add(name, PROMPT_A)
    engine.run_to_idle()
    assert engine.connector.snapshot()["declined"]["in_flight"] + engine.connector.snapshot()["declined"]["known"] > 0
    engine.assert_right()


def test_producer_saves_and_consumer_loads_only(engines):
    filled(engines, role="kv_producer")
    consumer = engines(role="kv_consumer")
    consumer.add("a", PROMPT_A)
    consumer.add("b", PROMPT_B)
    consumer.run_to_idle()
    consumer.assert_right()
    assert consumer.connector.snapshot()["hit_tokens"] == 16
    assert consumer.connector.snapshot()["store_jobs"]["done"] == 0


def test_after_a_reset_nothing_older_is_served(engines):
    engine = filled(engines)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("again", PROMPT_A)
    engine.run_to_idle()
    assert engine.connector.snapshot()["hit_tokens"] == 0
    engine.assert_right()


def test_decode_blocks_are_saved_when_asked(engines):
    engine = engines(save_decode_cache=True)
    engine.add("a", PROMPT_A, max_tokens=21)
    engine.run_to_idle()
    engine.assert_right()
    assert len(engine.stored_keys()) == 10
