"""The rank side against a real Mooncake store: paged tensors → job → store → job → other tensors, bit by bit.

The device is a parameter: CPU memory always, CUDA where there is one; needs no vLLM.
"""

import pytest
import torch

from demo.faults import Fault, Gate
from kvledger.errors import ConfigError
from kvledger.protocol import Kind, Ledger, PinTable, Report, Result, StepPlan
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


def store_while_blocks_are_reused(rank: Rank, *, honours_pins: bool) -> tuple[list[int], list[int]]:
    """Preempt a request under a held store, and let others overwrite each of its blocks that the pool hands out.

    A pool that honours pins hands out no pinned block. Returns the blocks handed out while the store was held, and after
    its report.
    """
    pins = PinTable(BLOCKS)
    ledger = Ledger(num_ranks=1, pins=pins, max_store_attempts=1, stall_timeout_s=1.0, retry_backoff_s=1.0)
    ledger.begin_generation("r")
    freed = [0, 1, 2, 3]
    store_job = ledger.emit_store("r", 4, freed, [i.to_bytes(4, "big") for i in range(4)], now=0.0)
    assert store_job is not None
    ledger.end_generation("r")  # preempted: vLLM frees its blocks at once
    gates = {"exists": Gate(), "put": Gate()}
    rank.client.add(Fault(operation="exists", gate=gates["exists"]))
    rank.client.add(Fault(operation="put", gate=gates["put"]))
    rank.submit(store_job)

    def reuse() -> list[int]:
        taken = [b for b in freed if not honours_pins or b not in dict(pins.blocks())]
        freed[:] = [b for b in freed if b not in taken]
        for cache in rank.caches.values():
            cache[taken] = -1.0
        return taken

    while_held = []
    for gate in gates.values():
        assert gate.reached.wait(10)
        while_held += reuse()
        gate.open()
    for report in rank.reports():
        assert ledger.apply_report(report, 1.0) is not None
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
def test_chunk_of_a_deep_model_is_stored_and_loaded_whole(make_rank, mode):
    """2,048 tokens of a 32-layer model are 4,096 runs, twice what Mooncake queues per peer over TCP."""
    deep = {"layers": 32, "shape": (128, 2, 16, 16), "transfer_mode": mode, "max_batch_bytes": "8MiB"}
    source, target = (make_rank(seed=seed, staging_bytes="64MiB", **deep) for seed in (1, 2))
    blocks = list(range(128))
    for rank, kind in ((source, Kind.STORE), (target, Kind.LOAD)):
        assert rank.run(job(1, kind, blocks, blocks)) == [Report(job_id=1, rank=0, result=Result.DONE)]
    assert all(torch.equal(source.caches[n], target.caches[n]) for n in source.caches)
