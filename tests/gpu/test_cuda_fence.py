"""On CUDA only: a store reads behind the kernels that fill its blocks, a load writes behind their last writer.

Needs torch with CUDA and Mooncake, not vLLM. `scripts/gpu-check.sh` runs this and the CUDA halves of the other tests.
"""

import pytest
import torch

from kvledger.config import load_settings
from kvledger.keys import KeySpace
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import running_embedded
from kvledger.protocol import Job, Kind, Result, StepPlan
from kvledger.worker.rank_side import RankSide

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCKS = 64
LONG_KERNEL_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture
def make_side(tmp_path):
    sides = []
    with running_embedded(tmp_path / "store", 64 << 20) as store:

        def make(caches: dict[str, torch.Tensor], mode: str) -> RankSide:
            settings = load_settings({"transfer_mode": mode}, {}).attached_to(store.master_address)
            client = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name="gpu")
            sides.append(RankSide(settings=settings, rank=0, keys=KeySpace(namespace="gpu"), client=client))
            sides[-1].register(caches, BLOCKS)
            return sides[-1]

        yield make
        for side in sides:
            side.close()


def run(side: RankSide, kind: Kind) -> None:
    names = tuple(i.to_bytes(4, "big") for i in range(BLOCKS))
    job = Job(job_id=1, kind=kind, generation=1, block_ids=tuple(range(BLOCKS)), hashes=names)
    side.bind(StepPlan(namespace="gpu", jobs=(job,)))
    side.start_loads()
    side.submit_stores(forward_failed=False)


def finish(side: RankSide) -> None:
    assert side.wait_idle(60)
    side.collect()
    assert [r.result for r in side.take_reports()] == [Result.DONE]


def fresh() -> dict[str, torch.Tensor]:
    return {f"l{i}": torch.zeros((BLOCKS, 2, 16, 64), device="cuda") for i in range(4)}


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_store_waits_for_the_forward_that_fills_its_blocks(make_side, mode):
    caches = fresh()
    side = make_side(caches, mode)
    torch.cuda._sleep(LONG_KERNEL_CYCLES)
    for i, cache in enumerate(caches.values()):
        cache.copy_(torch.full_like(cache, i + 1.0))
    run(side, Kind.STORE)
    finish(side)
    read = fresh()
    reader = make_side(read, mode)
    run(reader, Kind.LOAD)
    finish(reader)
    assert all(torch.equal(read[n], caches[n]) for n in caches)


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_load_is_not_overwritten_by_an_earlier_step(make_side, mode):
    caches = {n: torch.rand_like(t) for n, t in fresh().items()}
    side = make_side(caches, mode)
    run(side, Kind.STORE)
    finish(side)
    read = fresh()
    reader = make_side(read, mode)
    torch.cuda._sleep(LONG_KERNEL_CYCLES)
    for cache in read.values():
        cache.fill_(-1.0)  # a step still in flight writes the blocks' old owner's data
    run(reader, Kind.LOAD)
    finish(reader)
    torch.cuda.synchronize()
    assert all(torch.equal(read[n], caches[n]) for n in caches)
