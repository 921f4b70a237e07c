"""The rank side against a real Mooncake store: paged tensors → job → store → job → other tensors, bit by bit.

The device is a parameter: CPU memory always, CUDA where there is one; needs no vLLM.
"""

import pytest
import torch

from demo.faults import Fault, Gate
from kvledger.config import load_settings
from kvledger.errors import ConfigError
from kvledger.keys import KeySpace
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import running_embedded
from kvledger.protocol import Kind, Ledger, PinTable, Report, Result, StepPlan
from kvledger.worker.rank_side import RankSide
from tests.support.ranks import BLOCKS, LAYERS, Rank, job, same_block

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODES = ["staged", "direct"]


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
    ledger = Ledger(num_ranks=1, pins=PinTable(BLOCKS), max_store_attempts=1, stall_timeout_s=1.0, retry_backoff_s=1.0)
    pool = Pool(ledger, honours_pins=honours_pins)
    ledger.begin_generation("r")
    names = [i.to_bytes(4, "big") for i in range(4)]
    store_job = ledger.emit_store("r", 4, [0, 1, 2, 3], names, now=0.0)
    assert store_job is not None
    pool.pin(store_job.block_ids)
    gates = [Gate(), Gate()]
    rank.client.add(Fault(operation="exists", gate=gates[0]))
    rank.client.add(Fault(operation="put", gate=gates[1]))
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
        assert settled is not None
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
