"""The rank side when the store refuses, fails, lies or hangs: one report per job, and no byte where it does not belong."""

import dataclasses

import pytest

from demo.faults import Fault, Gate
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import list_keys
from kvledger.protocol import Kind, Result, StepPlan
from kvledger.worker.fence import Fence
from kvledger.worker.rank_side import RankSide
from tests.support.ranks import BLOCKS, OBJECT_BYTES, Rank, job, make_settings, same_block


class NeverPassed:
    """An event of a device that hangs."""

    def query(self) -> bool:
        return False


class TestStoreFaults:
    @pytest.mark.parametrize(
        ("fault", "result"),
        [
            (Fault(operation="exists", error=RuntimeError("probe broke")), Result.FAILED),
            (Fault(operation="exists", code=-900), Result.FAILED),
            (Fault(operation="exists", short=True), Result.FAILED),
            (Fault(operation="put", error=RuntimeError("put broke")), Result.INDETERMINATE),
            (Fault(operation="put", code=-800, transfer=True), Result.INDETERMINATE),
            (Fault(operation="put", short=True), Result.INDETERMINATE),
            (Fault(operation="put", code=-200), Result.REFUSED),
            (Fault(operation="put", code=-600), Result.FAILED),
        ],
    )
    def test_one_report_whatever_happens_and_the_next_job_works(self, make_rank, fault, result):
        rank = make_rank(seed=1)
        rank.client.add(dataclasses.replace(fault, call=1))

        first = rank.run(job(1, Kind.STORE, [0, 1], [0, 1]))
        second = rank.run(job(2, Kind.STORE, [2], [2]))

        assert [(r.job_id, r.result, r.bad) for r in first] == [(1, result, (0, 1))]
        assert [(r.job_id, r.result) for r in second] == [(2, Result.DONE)]

    def test_only_the_refused_blocks_are_bad(self, make_rank):
        rank = make_rank(seed=1)
        rank.client.add(Fault(operation="put", code=-200, positions=frozenset({1})))
        reports = rank.run(job(1, Kind.STORE, [0, 1, 2], [0, 1, 2]))
        assert [(r.result, r.bad) for r in reports] == [(Result.REFUSED, (1,))]

    def test_direct_transfer_that_may_still_move_is_reported_only_after_the_quarantine(self, make_rank):
        rank = make_rank(seed=1, transfer_mode="direct", quarantine_s=2.0)
        rank.client.add(Fault(operation="put", code=-800, transfer=True))
        rank.submit(job(1, Kind.STORE, [0], [0]))
        while not rank.side.snapshot().quarantined:
            assert not rank.side.wait_idle(0.05)
        rank.side.collect()
        assert rank.side.take_reports() == []

        while rank.side.snapshot().quarantined:
            rank.side.wait_idle(0.1)
            rank.side.collect()

        assert [r.result for r in rank.side.take_reports()] == [Result.INDETERMINATE]

    def test_staging_slot_of_a_late_transfer_is_not_used_again_before_its_bound(self, make_rank):
        rank = make_rank(seed=1, quarantine_s=60.0, max_batch_bytes=OBJECT_BYTES, staging_bytes=2 * 2 * OBJECT_BYTES)
        for call in (1, 2):
            rank.client.add(Fault(operation="put", call=call, code=-800, transfer=True))
        first = rank.run(job(1, Kind.STORE, [0], [0]))
        second = rank.run(job(2, Kind.STORE, [1], [1]))
        third = rank.run(job(3, Kind.STORE, [2], [2]))
        assert [r[0].result for r in (first, second, third)] == [
            Result.INDETERMINATE,
            Result.INDETERMINATE,
            Result.FAILED,
        ]

    def test_batches_become_smaller_while_late_transfers_hold_staging_memory(self, make_rank):
        rank = make_rank(
            seed=1, quarantine_s=60.0, max_batch_bytes=4 * OBJECT_BYTES, staging_bytes=2 * 8 * OBJECT_BYTES
        )
        for call in (1, 2):
            rank.client.add(Fault(operation="put", call=call, code=-800, transfer=True))
        late = [
            *rank.run(job(1, Kind.STORE, [0, 1, 2, 3], [0, 1, 2, 3])),
            *rank.run(job(2, Kind.STORE, [4, 5], [4, 5])),
        ]
        assert [r.result for r in late] == [Result.INDETERMINATE] * 2
        assert rank.client.calls("put") == 2

        names = [6, 7, 8]
        assert [r.result for r in rank.run(job(3, Kind.STORE, names, names))] == [Result.DONE]

        assert rank.client.calls("put") == 5
        reader = make_rank()
        reader.run(job(1, Kind.LOAD, names, names))
        assert all(same_block(reader, n, rank, n) for n in names)

    def test_nothing_is_published_after_a_forward_that_raised(self, make_rank, store, keys):
        rank = make_rank(seed=1)
        rank.submit(job(1, Kind.STORE, [0], [0]), forward_failed=True)
        assert [r.result for r in rank.reports()] == [Result.DROPPED]
        assert not [k for k in list_keys(store.metrics_port) if k.startswith(keys.prefix())]

    def test_job_told_but_never_submitted_is_reported_at_the_next_step(self, make_rank):
        rank = make_rank(seed=1)
        rank.side.bind(StepPlan(namespace="ns", jobs=(job(1, Kind.STORE, [0], [0]),)))
        assert [(r.job_id, r.result) for r in rank.run()] == [(1, Result.DROPPED)]

    def test_rank_without_layers_reports_every_job(self, store, keys):
        settings = make_settings(store)
        client = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name="empty")
        side = RankSide(settings=settings, rank=0, keys=keys, client=client)
        side.register({}, BLOCKS)
        side.bind(StepPlan(namespace="ns", jobs=(job(1, Kind.STORE, [0], [0]), job(2, Kind.LOAD, [1], [1]))))
        side.start_loads()
        side.submit_stores(forward_failed=False)
        side.collect()
        assert [r.result for r in side.take_reports()] == [Result.DROPPED] * 2
        side.close()

    def test_queued_jobs_are_reported_at_close(self, make_rank):
        rank = make_rank(seed=1)
        gate = Gate()
        rank.client.add(Fault(operation="exists", call=1, gate=gate))
        rank.submit(job(1, Kind.STORE, [0], [0]), job(2, Kind.STORE, [1], [1]))
        assert gate.reached.wait(10)
        rank.side.close()
        rank.side.collect()
        assert {r.job_id for r in rank.side.take_reports()} >= {2}


class TestLoadFaults:
    @pytest.fixture
    def stored(self, make_rank) -> Rank:
        source: Rank = make_rank(seed=1)
        source.run(job(1, Kind.STORE, [0, 1, 2], [0, 1, 2]))
        return source

    @pytest.mark.parametrize(
        ("fault", "result", "bad"),
        [
            (Fault(operation="get", error=RuntimeError("get broke")), Result.INDETERMINATE, (0, 1, 2)),
            (Fault(operation="get", code=-800, transfer=True), Result.INDETERMINATE, (0, 1, 2)),
            (Fault(operation="get", code=-707, transfer=True), Result.FAILED, (0, 1, 2)),
            (Fault(operation="get", code=-704, positions=frozenset({1})), Result.FAILED, (1,)),
            (Fault(operation="get", code=17, positions=frozenset({2})), Result.FAILED, (2,)),
            (Fault(operation="get", short=True), Result.INDETERMINATE, (0, 1, 2)),
        ],
    )
    def test_what_did_not_provably_arrive_is_bad_and_the_load_ends_once(self, make_rank, stored, fault, result, bad):
        rank = make_rank()
        rank.client.add(fault)

        reports = rank.run(job(1, Kind.LOAD, [7, 8, 9], [0, 1, 2], reply_to="r"))

        assert [(r.result, r.bad) for r in reports] == [(result, bad)]
        assert rank.side.take_finished_loads() == {"r"}
        assert rank.side.take_bad_blocks() == {7 + p for p in bad}
        assert all(same_block(rank, 7 + p, stored, p) for p in range(3) if p not in bad)
        assert rank.side.take_finished_loads() == set()
        assert rank.side.take_bad_blocks() == set()

    def test_missing_object_fails_that_block(self, make_rank, stored):
        rank = make_rank()
        reports = rank.run(job(1, Kind.LOAD, [7, 8, 9], [0, 99, 2], reply_to="r"))
        assert [(r.result, r.bad) for r in reports] == [(Result.FAILED, (1,))]

    def test_blocks_behind_a_failed_batch_are_bad_too(self, make_rank, stored):
        rank = make_rank(max_batch_bytes=OBJECT_BYTES)
        rank.client.add(Fault(operation="get", call=2, code=-704))
        reports = rank.run(job(1, Kind.LOAD, [7, 8, 9], [0, 1, 2], reply_to="r"))
        assert [(r.result, r.bad) for r in reports] == [(Result.FAILED, (1, 2))]

    def test_object_of_another_size_is_bad_and_touches_nothing(self, make_rank, store, keys):
        other = Rank(store, keys, seed=4)
        smaller = {n: t[:, :, :8].contiguous() for n, t in other.caches.items()}
        client = MooncakeClient.connect(other.settings, segment_bytes=0, buffer_bytes=0, name="smaller")
        side = RankSide(settings=other.settings, rank=0, keys=keys, client=client)
        side.register(smaller, BLOCKS)
        side.bind(StepPlan(namespace="ns", jobs=(job(1, Kind.STORE, [0], [0]),)))
        side.submit_stores(forward_failed=False)
        assert side.wait_idle(10)
        rank = make_rank()
        reports = rank.run(job(1, Kind.LOAD, [3], [0]))
        assert reports[0].bad == (0,)
        assert not any(t.any() for t in rank.caches.values())
        for s in (side, other.side):
            s.close()

    def test_synchronous_load_has_arrived_when_the_hook_returns(self, make_rank, stored):
        rank = make_rank()
        rank.side.bind(StepPlan(namespace="ns", jobs=(job(1, Kind.LOAD, [4], [2], sync=True),)))
        rank.side.start_loads()
        assert same_block(rank, 4, stored, 2)
        rank.side.collect()
        assert rank.side.take_finished_loads() == set()
        assert [r.result for r in rank.side.take_reports()] == [Result.DONE]

    def test_synchronous_load_is_given_up_after_its_bound_and_writes_nothing_later(self, make_rank, stored):
        rank = make_rank(load_timeout_s=0.3)
        gate = Gate()
        rank.client.add(Fault(operation="get", call=1, gate=gate))
        rank.side.bind(StepPlan(namespace="ns", jobs=(job(1, Kind.LOAD, [4], [2], sync=True),)))
        rank.side.start_loads()
        rank.side.collect()
        assert [r.result for r in rank.side.take_reports()] == [Result.INDETERMINATE]
        assert rank.side.take_bad_blocks() == {4}

        # The lane still sits in the call: later jobs are dropped, not queued behind it.
        assert [r.result for r in rank.run(job(2, Kind.LOAD, [5], [2]))] == [Result.DROPPED]
        gate.open()
        lane = rank.side._lanes[Kind.LOAD]
        while lane.running is not None:
            rank.side.wait_idle(0.01)
        assert not any(t.any() for t in rank.caches.values())
        assert [r.result for r in rank.run(job(3, Kind.LOAD, [6], [2]))] == [Result.DONE]

    def test_asynchronous_load_ends_failed_after_its_bound_and_writes_nothing_later(self, make_rank, stored):
        rank = make_rank(load_timeout_s=0.3)
        gate = Gate()
        rank.client.add(Fault(operation="get", call=1, gate=gate))
        rank.submit(job(1, Kind.LOAD, [4], [1], reply_to="a"), job(2, Kind.LOAD, [5], [2], reply_to="b"))
        while not rank.side.wait_idle(0.05):
            rank.side.collect()
        assert {r.job_id: r.result for r in rank.side.take_reports()} == {1: Result.INDETERMINATE, 2: Result.DROPPED}
        assert rank.side.take_finished_loads() == {"a", "b"}
        assert rank.side.take_bad_blocks() == {4, 5}
        gate.open()
        while rank.side._lanes[Kind.LOAD].running is not None:
            rank.side.wait_idle(0.01)
        assert not any(t.any() for t in rank.caches.values())

    @pytest.mark.parametrize(("kind", "mode"), [(Kind.STORE, "staged"), (Kind.STORE, "direct"), (Kind.LOAD, "staged")])
    def test_a_device_that_never_passes_the_fence_fails_the_job_and_not_the_store(
        self, make_rank, stored, monkeypatch, kind, mode
    ):
        rank = make_rank(transfer_mode=mode, transfer_timeout_s=0.2, breaker_failures=1)
        names = {Kind.STORE: 99, Kind.LOAD: 2}
        with monkeypatch.context() as hung:
            hung.setattr(rank.side, "_record_fence", lambda device: Fence(NeverPassed()))
            reports = rank.run(job(1, kind, [4], [names[kind]], reply_to="a"))
        assert [(r.result, r.bad) for r in reports] == [(Result.FAILED, (0,))]
        assert not any(t.any() for t in rank.caches.values())
        assert [r.result for r in rank.run(job(2, Kind.LOAD, [4], [2]))] == [Result.DONE]

    def test_aborted_load_that_is_still_queued_is_dropped_and_answered(self, make_rank, stored):
        rank = make_rank()
        gate = Gate()
        rank.client.add(Fault(operation="get", call=1, gate=gate))
        rank.submit(job(1, Kind.LOAD, [4], [1], reply_to="a"), job(2, Kind.LOAD, [5], [2], reply_to="b"))
        assert gate.reached.wait(10)
        rank.side.bind(StepPlan(namespace="ns", cancelled=(2,)))
        rank.side.collect()
        assert rank.side.take_finished_loads() == {"b"}
        gate.open()
        rank.reports()
        assert rank.side.take_finished_loads() == {"a"}
