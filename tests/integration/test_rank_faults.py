"""The rank side when the store refuses, fails, lies or hangs: one report per job, and no byte where it does not belong."""

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from demo.faults import Fault, Gate
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import list_keys
from kvledger.protocol import Kind, Result, StepPlan
from kvledger.worker import lanes
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


class Broken:
    """Something that raises when called."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *args, **kwargs):
        raise self.error


def transfer(rank: Rank, kind: Kind):
    """The transfer that a lane runs."""
    cells = rank.side._lanes[kind]._run.__closure__ or ()
    return next(c.cell_contents for c in cells if hasattr(c.cell_contents, "run"))


def store_fault(**fault) -> Callable[[Rank], None]:
    return lambda rank: rank.client.add(Fault(**fault))


def broken(name: str, error: BaseException, kind: Kind = Kind.STORE) -> Callable[[Rank], None]:
    """The method of the lane's transfer that raises; with a dot, of a part of it."""

    def breaks(rank: Rank) -> None:
        part, _, method = name.rpartition(".")
        setattr(getattr(transfer(rank, kind), part) if part else transfer(rank, kind), method, Broken(error))

    return breaks


def no_slot(rank: Rank) -> None:
    staging = transfer(rank, Kind.STORE)._staging
    staging.take = lambda count, now: None


def hung_device(rank: Rank) -> None:
    rank.side._record_fence = lambda device: Fence(NeverPassed())


def open_breaker(rank: Rank) -> None:
    breaker = transfer(rank, Kind.STORE)._breaker
    for _ in range(100):
        breaker.failure(time.monotonic())


def dead_lane(rank: Rank) -> None:
    """Its preparation fails for ever: over."""
    lane = rank.side._lanes[Kind.STORE]
    lane._prepare = Broken(RuntimeError("no stream"))
    lane._run = Broken(RuntimeError("out of the guard"))
    rank.run(job(90, Kind.STORE, [9], [90]))
    lane._thread.join(30)
    assert not lane._thread.is_alive()


def lost_lane(rank: Rank) -> None:
    rank.side._lanes[Kind.STORE]._run = Broken(SystemExit("out of the guard"))


OOM = torch.OutOfMemoryError("no memory")
PATHS = {
    "probe raises": (Kind.STORE, store_fault(operation="exists", error=OSError("x")), Result.FAILED, "exists OSError"),
    "probe answers None": (Kind.STORE, store_fault(operation="exists", nothing=True), Result.FAILED, "exists wrong length"),
    "probe short": (Kind.STORE, store_fault(operation="exists", short=True), Result.FAILED, "exists wrong length"),
    "probe fails": (Kind.STORE, store_fault(operation="exists", code=-900), Result.FAILED, "exists RPC_FAIL"),
    "probe odd": (Kind.STORE, store_fault(operation="exists", code=7), Result.FAILED, "exists wrong size"),
    "put raises": (Kind.STORE, store_fault(operation="put", error=OSError("x")), Result.INDETERMINATE, "put OSError"),
    "put answers None": (Kind.STORE, store_fault(operation="put", nothing=True), Result.INDETERMINATE, "put wrong length"),
    "put short": (Kind.STORE, store_fault(operation="put", short=True), Result.INDETERMINATE, "put wrong length"),
    "put no space": (Kind.STORE, store_fault(operation="put", code=-200), Result.REFUSED, "put NO_AVAILABLE_HANDLE"),
    "put over quota": (Kind.STORE, store_fault(operation="put", code=-1700), Result.REFUSED, "put TENANT_QUOTA_EXCEEDED"),
    "put refused": (Kind.STORE, store_fault(operation="put", code=-600), Result.FAILED, "put INVALID_PARAMS"),
    "put master gone": (Kind.STORE, store_fault(operation="put", code=-900), Result.FAILED, "put RPC_FAIL"),
    "put may move": (Kind.STORE, store_fault(operation="put", code=-800), Result.INDETERMINATE, "put TRANSFER_FAIL"),
    "put unknown": (Kind.STORE, store_fault(operation="put", code=-54_321), Result.INDETERMINATE, "put code -54321"),
    "get raises": (Kind.LOAD, store_fault(operation="get", error=OSError("x")), Result.INDETERMINATE, "get OSError"),
    "get answers None": (Kind.LOAD, store_fault(operation="get", nothing=True), Result.INDETERMINATE, "get wrong length"),
    "get missing": (Kind.LOAD, store_fault(operation="get", code=-704), Result.FAILED, "get OBJECT_NOT_FOUND"),
    "get wrong size": (Kind.LOAD, store_fault(operation="get", code=17), Result.FAILED, "get wrong size"),
    "get lease over": (Kind.LOAD, store_fault(operation="get", code=-707), Result.FAILED, "get LEASE_EXPIRED"),
    "gather out of memory": (
        Kind.STORE, broken("_layout.gather", OOM), Result.FAILED, "store in this process OutOfMemoryError"),
    "scatter out of memory": (
        Kind.LOAD, broken("_layout.scatter", OOM, Kind.LOAD), Result.FAILED, "load in this process OutOfMemoryError"),
    "fence": (Kind.STORE, hung_device, Result.FAILED, "store FenceTimeoutError"),
    "no slot": (Kind.STORE, no_slot, Result.FAILED, "store NoSlotError"),
    "breaker": (Kind.STORE, open_breaker, Result.FAILED, "store not tried"),
    "lane dies in a job": (Kind.STORE, lost_lane, Result.INDETERMINATE, "store lane died"),
    "lane is over": (Kind.STORE, dead_lane, Result.DROPPED, "dropped: store lane is down"),
    "shutdown": (Kind.STORE, lambda rank: rank.side.close(), Result.DROPPED, "dropped: shutdown"),
}  # fmt: skip


class TestNoSilence:
    @pytest.fixture(autouse=True)
    def quick_restarts(self, monkeypatch):
        monkeypatch.setattr(lanes, "RESTART_PAUSE_S", 0.01)

    @pytest.mark.parametrize("path", PATHS)
    def test_every_failure_is_one_report_and_raises_one_counter(self, make_rank, path):
        kind, breaks, result, counter = PATHS[path]
        make_rank(seed=1).run(job(1, Kind.STORE, [0], [0]))
        rank = make_rank(seed=2, transfer_timeout_s=0.5)
        breaks(rank)
        before = rank.side.snapshot().faults
        name = 0 if kind is Kind.LOAD else 7

        reports = rank.run(job(1, kind, [3], [name]))

        assert [(r.job_id, r.result, r.bad) for r in reports] == [(1, result, (0,))]
        after = rank.side.snapshot().faults
        assert {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k)} == {counter: 1}
        rank.side.collect()
        assert rank.side.take_reports() == []

    @pytest.mark.parametrize(
        "path", ["never submitted", "the forward failed", "aborted", "given up", "late load", "stuck"]
    )
    def test_every_job_that_does_not_run_to_its_end_is_one_report_and_raises_one_counter(self, make_rank, path):
        rank = make_rank(seed=1, load_timeout_s=0.2 if path == "late load" else 60.0, transfer_timeout_s=0.5)
        kind = Kind.STORE if path != "late load" else Kind.LOAD
        gate = Gate()
        if path in ("aborted", "given up", "late load", "stuck"):
            rank.client.add(Fault(operation="exists" if kind is Kind.STORE else "get", call=1, gate=gate))
        jobs = [job(1, kind, [0], [0])]
        if path in ("aborted", "stuck"):
            jobs.append(job(2, kind, [1], [1]))
        if path == "never submitted":
            rank.side.bind(StepPlan(namespace="ns", jobs=tuple(jobs)))
            rank.side.bind(StepPlan(namespace="ns"))
        else:
            rank.submit(*jobs, forward_failed=path == "the forward failed")
        if path == "aborted":
            assert gate.reached.wait(10)
            rank.side.bind(StepPlan(namespace="ns", cancelled=(2,)))
            gate.open()
        deadline = time.monotonic() + 30
        while not rank.side.wait_idle(0.02) and time.monotonic() < deadline:
            rank.side.collect()
        rank.side.collect()
        gate.open()

        assert sorted(r.job_id for r in rank.side.take_reports()) == [j.job_id for j in jobs]
        expected = {
            "given up": {"given up": 1},
            "late load": {"late load": 1},
            "stuck": {"given up": 1, "dropped: store lane is inside a call that does not end": 1},
        }
        assert rank.side.snapshot().faults == expected.get(path, {f"dropped: {path}": 1})

    def test_each_kind_of_failed_call_has_its_line_and_what_was_held_back_comes_at_the_end(self, make_rank, caplog):
        caplog.set_level("INFO", logger="kvledger.observe.faults")
        rank = make_rank(seed=1)
        for code in (-200, -200, -600):
            rank.client.add(Fault(operation="put", call=rank.client.calls("put") + 1, code=code))
            rank.run(job(rank.client.calls("put") + 1, Kind.STORE, [0], [0]))
        said = [m for m in caplog.messages if m.startswith("kvledger rank 0: put")]
        assert [m.split(": ")[1] for m in said] == ["put NO_AVAILABLE_HANDLE", "put INVALID_PARAMS"]
        rank.side.close()
        assert "kvledger rank 0: put NO_AVAILABLE_HANDLE, 1 more since the last line" in caplog.messages

    @pytest.mark.parametrize("path", ["gather out of memory", "scatter out of memory"])
    def test_what_fails_in_this_process_does_not_open_the_stores_breaker(self, make_rank, path):
        kind, breaks, _, _ = PATHS[path]
        make_rank(seed=1).run(job(1, Kind.STORE, [0], [0]))
        rank = make_rank(seed=2, breaker_failures=1)
        breaks(rank)
        for job_id in (1, 2, 3):
            rank.run(job(job_id, kind, [3], [0 if kind is Kind.LOAD else 7]))
        assert rank.side.snapshot().breakers == {}
        assert not transfer(rank, kind)._breaker.is_open

    def test_a_store_that_fails_opens_it(self, make_rank):
        """The control of the test above."""
        rank = make_rank(seed=2, breaker_failures=1)
        rank.client.add(Fault(operation="put", code=-900))
        rank.run(job(1, Kind.STORE, [3], [7]))
        assert rank.side.snapshot().breakers == {"store breaker opened": 1}

    @pytest.mark.parametrize("mode", ["staged", "direct"])
    def test_a_lane_that_dies_reports_its_job_and_those_behind_it_and_starts_again(self, make_rank, caplog, mode):
        rank = make_rank(seed=1, transfer_mode=mode)
        lane = rank.side._lanes[Kind.STORE]
        gate, run = Gate(), lane._run

        def dies(_job):
            gate.pass_through()
            raise RuntimeError("out of the guard")

        lane._run = dies
        rank.submit(job(1, Kind.STORE, [0], [0]), job(2, Kind.STORE, [1], [1]))
        assert gate.reached.wait(10)
        lane._run = run
        gate.open()
        deadline = time.monotonic() + 30
        while not rank.side.wait_idle(0.02) and time.monotonic() < deadline:
            rank.side.collect()
        reports = {r.job_id: r.result for r in rank.reports()}
        assert reports == {1: Result.INDETERMINATE, 2: Result.DROPPED}
        assert rank.side.snapshot().faults == {"store lane died": 1, "dropped: store lane is down": 1}
        assert [r.levelname for r in caplog.records if "store lane died" in r.getMessage()] == ["ERROR"]
        while not lane.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [r.result for r in rank.run(job(3, Kind.STORE, [2], [2]))] == [Result.DONE]

    def test_a_lane_that_is_over_says_once_that_the_rank_only_computes(self, make_rank, caplog):
        rank = make_rank(seed=1)
        dead_lane(rank)
        for job_id in (1, 2):
            assert [r.result for r in rank.run(job(job_id, Kind.STORE, [0], [0]))] == [Result.DROPPED]
        assert len([m for m in caplog.messages if "only computes" in m]) == 1
        assert rank.side.snapshot().lanes == {"store": False, "load": True}
        assert [r.result for r in rank.run(job(3, Kind.LOAD, [0], [99]))] == [Result.FAILED]

    def test_a_put_that_never_returns_does_not_hold_the_end_longer_than_vllm_grants(self, make_rank):
        rank = make_rank(seed=1, shutdown_timeout_s=60.0)
        gate = Gate()
        rank.client.add(Fault(operation="put", call=1, gate=gate))
        rank.client.close = lambda timeout_s: None  # it would open the gate
        rank.submit(job(1, Kind.STORE, [0], [0]), job(2, Kind.STORE, [1], [1]))
        assert gate.reached.wait(10)
        begun = time.monotonic()
        rank.side.close()
        assert time.monotonic() - begun < 2.5
        rank.side.collect()
        assert {r.job_id: r.result for r in rank.side.take_reports()} == {1: Result.INDETERMINATE, 2: Result.DROPPED}
        gate.open()
        del rank.client.close
        rank.client.close(5.0)
