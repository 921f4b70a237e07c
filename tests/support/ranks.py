"""Ranks on a real Mooncake store, for the tests of the rank side: caches, settings, a client that can be told to fail."""

import functools
from typing import Any

import torch

from demo.faults import FaultyStore
from kvledger.config import Settings, load_settings
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import EmbeddedStore
from kvledger.protocol import Job, Kind, Report, StepPlan
from kvledger.worker.rank_side import RankSide

BLOCKS = 12
SHAPE = (BLOCKS, 2, 16, 64)
LAYERS = 5
OBJECT_BYTES = LAYERS * 2 * 16 * 64 * 4


def make_settings(store: EmbeddedStore, **extra) -> Settings:
    base = {"staging_bytes": "1MiB", "max_batch_bytes": "256KiB", "shutdown_timeout_s": 3.0, "quarantine_s": 0.2}
    return load_settings({**base, **extra}, {}).attached_to(store.master_address)


def make_caches(device: str, seed: int | None, layers: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random numbers, or zeros without a seed."""
    generator = torch.Generator().manual_seed(seed or 0)
    make = torch.zeros if seed is None else functools.partial(torch.rand, generator=generator)
    return {f"layer{i}": make(shape).to(device) for i in range(layers)}


class Rank:
    """A rank with its caches, its store client wrapped for faults, and a step that ends when the job has."""

    def __init__(
        self, store, keys, *, device="cpu", seed=None, rank=0, layers=LAYERS, shape=SHAPE, **extra: Any
    ) -> None:
        self.settings = make_settings(store, **extra)
        inner = MooncakeClient.connect(self.settings, segment_bytes=0, buffer_bytes=0, name=f"test{rank}")
        self.client = FaultyStore(inner)
        self.side = RankSide(settings=self.settings, rank=rank, keys=keys, client=self.client)
        self.keys = keys
        self.caches = make_caches(device, seed, layers, shape)
        self.side.register(self.caches, shape[0])

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


def job(job_id: int, kind: Kind, blocks: list[int], names: list[int], **extra) -> Job:
    hashes = tuple(n.to_bytes(4, "big") for n in names)
    return Job(job_id=job_id, kind=kind, generation=1, block_ids=tuple(blocks), hashes=hashes, **extra)


def same_block(a: Rank, block_a: int, b: Rank, block_b: int) -> bool:
    return all(torch.equal(a.caches[n][block_a], b.caches[n][block_b]) for n in a.caches)
