"""The rank side against a real Mooncake store: paged tensors → job → store → job → other tensors, bit by bit.

The device is a parameter: CPU memory always, CUDA where there is one; needs no vLLM.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kvledger.config import Settings, load_settings
from kvledger.errors import ConfigError
from kvledger.keys import KeySpace
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import EmbeddedStore, list_keys, running_embedded
from kvledger.mooncake.faults import Fault, FaultyStore, Gate
from kvledger.protocol import Job, Kind, Ledger, Report, Result
from kvledger.worker.fence import Fence
from kvledger.worker.layout import CacheLayout
from kvledger.worker.rank_side import RankSide, StepPlan

BLOCKS = 12
SHAPE = (BLOCKS, 2, 16, 64)
LAYERS = 5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODES = ["staged", "direct"]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[EmbeddedStore]:
    with running_embedded(tmp_path_factory.mktemp("store"), 64 << 20) as running:
        yield running


@pytest.fixture
def keys(request) -> KeySpace:
    return KeySpace(namespace="ns", cache_prefix=request.node.name)


def make_settings(store: EmbeddedStore, **extra) -> Settings:
    base = {"staging_bytes": "1MiB", "max_batch_bytes": "256KiB", "shutdown_timeout_s": 3.0, "quarantine_s": 0.2}
    return load_settings({**base, **extra}, {}).attached_to(store.master_address)


def make_caches(device: str, seed: int | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    return {
        f"layer{i}": (torch.zeros(SHAPE) if seed is None else torch.rand(SHAPE, generator=generator)).to(device)
        for i in range(LAYERS)
    }


class Rank:
    """A rank with its caches, its store client wrapped for faults, and a step that ends when the job has."""

    def __init__(self, store, keys, *, device="cpu", seed=None, rank=0, **extra) -> None:
        self.settings = make_settings(store, **extra)
        inner = MooncakeClient.connect(self.settings, segment_bytes=0, buffer_bytes=0, name=f"test{rank}")
        self.client = FaultyStore(inner)
        self.side = RankSide(settings=self.settings, rank=rank, keys=keys, client=self.client)
        self.keys = keys
        self.caches = make_caches(device, seed)
        self.side.register(self.caches, BLOCKS)

    def submit(self, *jobs: Job, forward_failed: bool = False) -> None:
        self.side.bind(StepPlan(namespace=self.keys.namespace, jobs=jobs))
        self.side.start_loads()
        self.side.submit_stores(forward_failed=forward_failed)

    def reports(self) -> list[Report]:
        assert self.side.wait_idle(30.0), self.side.snapshot()
        self.side.collect()
        return self.side.take_reports()

    def run(self, *jobs: Job) -> list[Report]:
        self.submit(*jobs)
        return self.reports()


@pytest.fixture
def make_rank(store, keys):
    made: list[Rank] = []

    def make(**kwargs) -> Rank:
        made.append(Rank(store, keys, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.side.close()


def job(job_id: int, kind: Kind, blocks: list[int], names: list[int], **extra) -> Job:
    hashes = tuple(n.to_bytes(4, "big") for n in names)
    return Job(job_id=job_id, kind=kind, generation=1, block_ids=tuple(blocks), hashes=hashes, **extra)


def same_block(a: Rank, block_a: int, b: Rank, block_b: int) -> bool:
    return all(torch.equal(a.caches[n][block_a], b.caches[n][block_b]) for n in a.caches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_every_block_comes_back_bit_exact_and_no_other_block_is_touched(make_rank, device, mode):
    source = make_rank(device=device, seed=1, transfer_mode=mode)
    target = make_rank(device=device, transfer_mode=mode)
    names = list(range(BLOCKS - 2))
    blocks = names[::-1]
    assert [r.result for r in source.run(job(1, Kind.STORE, blocks, names))] == [Result.DONE]

    reports = target.run(job(1, Kind.LOAD, names[2:], names[2:], reply_to="r"))

    assert reports == [Report(job_id=1, rank=0, result=Result.DONE)]
    assert target.side.take_finished_loads() == {"r"}
    assert target.side.take_bad_blocks() == set()
    assert all(same_block(target, n, source, blocks[n]) for n in names[2:])
    untouched = set(range(BLOCKS)) - set(names[2:])
    assert all(not target.caches[n][b].any() for n in target.caches for b in untouched)


def test_staged_and_direct_objects_are_interchangeable(make_rank):
    staged, direct = make_rank(seed=1, transfer_mode="staged"), make_rank(seed=2, transfer_mode="direct")
    staged.run(job(1, Kind.STORE, [0, 1], [0, 1]))
    direct.run(job(1, Kind.LOAD, [5, 6], [0, 1]))
    assert same_block(direct, 5, staged, 0)
    assert same_block(direct, 6, staged, 1)


class NeverPassed:
    """An event of a device that hangs."""

    def query(self) -> bool:
        return False


class Pool:
    """A block pool that keeps to the rule under test: a block is free when its owner and every pin have let go."""

    def __init__(self, ledger: Ledger, *, honours_pins: bool) -> None:
        self._ledger = ledger
        self._honours_pins = honours_pins
        self._pinned: set[int] = set()
        self._freed_by_owner: set[int] = set()

    def pin(self, blocks) -> None:
        self._pinned.update(blocks)

    def free(self, blocks) -> None:
        self._freed_by_owner.update(blocks)

    def release(self, blocks) -> None:
        self._pinned.difference_update(blocks)

    def take_all_free(self) -> list[int]:
        free = self._freed_by_owner - (self._pinned if self._honours_pins else set())
        self._freed_by_owner -= free
        return sorted(free)


def store_while_blocks_are_reused(rank: Rank, *, honours_pins: bool) -> tuple[list[int], list[int]]:
    """Preempt a request under a held store and let others overwrite every block that the pool hands out.

    Returns the blocks handed out while the store was held, and after its report.
    """
    ledger = Ledger(
        num_ranks=1, max_pinned_blocks=BLOCKS, max_store_attempts=1, stall_timeout_s=1.0, retry_backoff_s=1.0
    )
    pool = Pool(ledger, honours_pins=honours_pins)
    ledger.begin_generation("r")
    names = [i.to_bytes(4, "big") for i in range(4)]
    store_job = ledger.emit_store("r", 4, [0, 1, 2, 3], names, now=0.0)
    pool.pin(store_job.block_ids)
    gates = [Gate(), Gate()]
    for operation, gate in zip(("exists", "put"), gates, strict=True):
        rank.client.add(Fault(operation=operation, gate=gate))
    rank.submit(store_job)
    assert gates[0].reached.wait(10)

    def reuse() -> list[int]:
        taken = pool.take_all_free()
        for cache in rank.caches.values():
            cache[taken] = -1.0
        return taken

    ledger.end_generation("r")  # preempted: vLLM frees its blocks at once
    pool.free([0, 1, 2, 3])
    while_held = reuse()
    gates[0].open()
    assert gates[1].reached.wait(10)
    while_held += reuse()
    gates[1].open()
    for report in rank.reports():
        settled = ledger.apply_report(report, 1.0)
        pool.release(settled.released)
    return while_held, reuse()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_block_reuse_under_a_held_put_changes_no_stored_byte(make_rank, device, mode):
    rank = make_rank(device=device, seed=3, transfer_mode=mode)
    original = {n: t.clone() for n, t in rank.caches.items()}

    while_held, after = store_while_blocks_are_reused(rank, honours_pins=True)

    assert while_held == []
    assert after == [0, 1, 2, 3]
    reader = make_rank(device=device, transfer_mode=mode)
    reader.run(job(1, Kind.LOAD, [0, 1, 2, 3], [0, 1, 2, 3]))
    assert all(torch.equal(reader.caches[n][:4], original[n][:4]) for n in original)


@pytest.mark.parametrize("mode", MODES)
def test_the_check_above_can_fail(make_rank, mode):
    """Negative control: with a pool that ignores pins the stored bytes are another request's."""
    rank = make_rank(seed=3, transfer_mode=mode)
    while_held, _ = store_while_blocks_are_reused(rank, honours_pins=False)
    assert while_held == [0, 1, 2, 3]
    reader = make_rank(transfer_mode=mode)
    reader.run(job(1, Kind.LOAD, [0, 1, 2, 3], [0, 1, 2, 3]))
    assert all((t[:4] == -1.0).all() for t in reader.caches.values())


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
        # Two slots per lane: one stays in quarantine, the other serves.
        rank = make_rank(seed=1, quarantine_s=60.0)
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
        source = make_rank(seed=1)
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
        one_object = CacheLayout.from_tensors(stored.caches, BLOCKS).object_bytes
        rank = make_rank(max_batch_bytes=one_object)
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
            hung.setattr("kvledger.worker.rank_side.record_fence", lambda device: Fence(NeverPassed()))
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


def test_ranks_in_another_namespace_refuse_the_plan(make_rank):
    rank = make_rank()
    with pytest.raises(ConfigError, match="namespace"):
        rank.side.bind(StepPlan(namespace="other"))


def test_block_that_fits_no_batch_is_an_error_at_start(store, keys):
    with pytest.raises(ConfigError, match="max_batch_bytes"):
        Rank(store, keys, max_batch_bytes="1KiB", staging_bytes="4KiB")


def test_direct_mode_bounds_segments(make_rank):
    rank = make_rank(seed=1, transfer_mode="direct", max_segments_in_flight=4 * LAYERS)
    rank.run(job(1, Kind.STORE, list(range(9)), list(range(9))))
    assert rank.client.calls("put") == 5


def test_job_without_progress_is_given_up(make_rank):
    rank = make_rank(seed=1, transfer_timeout_s=0.3)
    gate = Gate()
    rank.client.add(Fault(operation="exists", call=1, gate=gate))
    rank.submit(job(1, Kind.STORE, [0], [0]), job(2, Kind.STORE, [1], [1]))
    assert gate.reached.wait(10)
    while not rank.side.wait_idle(0.05):
        rank.side.collect()
    assert [(r.job_id, r.result) for r in rank.side.take_reports()] == [
        (1, Result.INDETERMINATE),
        (2, Result.DROPPED),
    ]
    gate.open()


@pytest.mark.parametrize("mode", MODES)
def test_chunk_of_a_deep_model_is_stored_and_loaded_whole(tmp_path, mode):
    """2,048 tokens of a 32-layer model are 4,096 runs, twice what Mooncake queues per peer over TCP."""
    layers, blocks = 32, 128
    with running_embedded(tmp_path / "store", 64 << 20) as own:
        settings = load_settings({"transfer_mode": mode, "max_batch_bytes": "8MiB"}, {}).attached_to(own.master_address)
        sides = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            caches = {f"l{i}": torch.rand((blocks, 2, 16, 16), generator=generator) for i in range(layers)}
            client = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name=f"deep{seed}")
            side = RankSide(settings=settings, rank=0, keys=KeySpace(namespace="deep"), client=client)
            side.register(caches, blocks)
            sides.append((side, caches))
        for (side, _), kind in zip(sides, (Kind.STORE, Kind.LOAD), strict=True):
            side.bind(StepPlan(namespace="deep", jobs=(job(1, kind, list(range(blocks)), list(range(blocks))),)))
            side.start_loads()
            side.submit_stores(forward_failed=False)
            assert side.wait_idle(30)
            side.collect()
            assert side.take_reports() == [Report(job_id=1, rank=0, result=Result.DONE)]
        assert all(torch.equal(sides[0][1][n], sides[1][1][n]) for n in sides[0][1])
        for side, _ in sides:
            side.close()
