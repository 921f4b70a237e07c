"""What surrounds kvledger's protocol in a tour: vLLM's block pool and requests, the store, the bounds of a model."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.tla import cfg
from kvledger.config import Settings
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace
from kvledger.scheduler.lookup import Lookup, LookupCounters

BLOCK_SIZE = 2
"""Tokens per block: a step may also end inside one."""
NEVER_S = 1e12
Named = tuple[int, bytes, str]
"""Rank shard, block hash, key epoch."""
KEYS = KeySpace(namespace="model")

State = dict[str, Any]


class Divergence(AssertionError):
    """kvledger did something else than the model."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The constants of a model that kvledger is configured with."""

    max_pinned: int
    max_attempts: int
    max_job: int
    depth: int
    defer_free: bool
    sync: bool

    @classmethod
    def read(cls, cfg_text: str) -> "Bounds":
        """From a TLC configuration."""
        found = {name: value.partition(" ")[2] for name, value in cfg.parse(cfg_text).constants.items()}
        return cls(
            max_pinned=int(found["MaxPinned"]),
            max_attempts=int(found["MaxAttempts"]),
            max_job=int(found["MaxJob"]),
            depth=int(found["Depth"]),
            defer_free=found["DeferFree"] == "TRUE",
            sync=found["SyncLoads"] == "Sync",
        )

    def settings(self) -> Settings:
        """kvledger's settings for this model. A clock moves only where the model says so."""
        return Settings(
            max_pinned_blocks=self.max_pinned,
            max_store_attempts=self.max_attempts + 1,
            stall_timeout_s=10.0,
            retry_backoff_s=0.0,
            load_async=not self.sync,
        )


@dataclass(slots=True)
class Block:
    """A block of the pool."""

    block_id: int
    ref_cnt: int = 0


class Pool:
    """References, as vLLM's block pool counts them, and strict: what is freed once too often is a divergence."""

    def __init__(self, size: int) -> None:
        self.blocks = [Block(i) for i in range(size + 1)]  # block 0 is vLLM's null block
        self.evicted: set[int] = set()

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more reference each."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """One reference less each.

        Raises:
            Divergence: a block that nobody holds.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                raise Divergence(f"block {block.block_id} is freed although nobody holds it")
            block.ref_cnt -= 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Out of the prefix cache."""
        self.evicted |= block_ids


@dataclass(slots=True, eq=False)
class CoreRequest:
    """The fields of vLLM's `Request` that kvledger reads."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 1
    skip_reading_prefix_cache: bool = False
    resumable: bool = False

    @property
    def num_tokens(self) -> int:
        """All of them are the prompt's."""
        return len(self.block_hashes) * BLOCK_SIZE

    @property
    def num_prompt_tokens(self) -> int:
        """The same."""
        return self.num_tokens


@dataclass(slots=True)
class StepOutput:
    """The fields of vLLM's `SchedulerOutput` that kvledger reads; offers the block tables of scheduled requests."""

    preempted_req_ids: set[str] = field(default_factory=set)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kv_connector_block_state(self) -> "StepOutput":
        """Itself."""
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """One group."""
        return (self.tables[request_id],)


class Objects:
    """The store: what lies under kvledger's own keys. Answers its lookups at once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._content: dict[str, tuple[Named, Any]] = {}
        self.counters = LookupCounters()

    def get(self, rank: int, name: bytes, epoch: str) -> Any:
        """What lies there, or None."""
        found = self._content.get(_key(rank, name, epoch))
        return None if found is None else found[1]

    def put(self, rank: int, name: bytes, epoch: str, content: Any) -> None:
        """Never replaces."""
        self._content.setdefault(_key(rank, name, epoch), ((rank, name, epoch), content))

    def remove(self, rank: int, name: bytes, epoch: str) -> None:
        """Evicted."""
        self._content.pop(_key(rank, name, epoch), None)

    def wipe(self) -> None:
        """All gone."""
        self._content.clear()

    def entries(self) -> Iterable[tuple[Named, Any]]:
        """Everything, with the parts of its key."""
        return list(self._content.values())

    def ask(self, hashes: Sequence[bytes], epoch: str) -> Lookup:
        """`LookupService.ask`."""
        lookup = Lookup(hashes, epoch, NEVER_S, found=0)
        for name in hashes:
            if any(self.get(k, name, epoch) is None for k in range(self._ranks)):
                lookup.missed = name
                break
            lookup.found = (lookup.found or 0) + 1
        lookup.done.set()
        return lookup

    def result(self, lookup: Lookup, _wait_s: float) -> int | None:
        """`LookupService.result`."""
        return lookup.found


@functools.lru_cache(maxsize=4096)
def _key(rank: int, name: bytes, epoch: str) -> str:
    return KEYS.object_key(shard=rank, group=0, block_hash=name, epoch=epoch)


def plan(*, blocks: int, ranks: int) -> GroupPlan:
    """One full-attention group."""
    return GroupPlan(
        block_size=BLOCK_SIZE,
        hashes_per_block=1,
        layer_names=("layer",),
        num_blocks=blocks + 1,
        num_ranks=ranks,
        max_blocks_per_request=blocks,
    )
