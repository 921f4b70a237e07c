# ruff: noqa: ARG002 - the hooks' signatures are vLLM's
"""A connector as one might write it first: full blocks go to a Mooncake store in the background, and come back.

It works in every demo. `kvledger-conformance --target naive:NaiveConnector` (from this folder) finds what is wrong.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake.store import MooncakeDistributedStore
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class Metadata(KVConnectorMetadata):
    """What the ranks shall do: block hashes and the blocks to copy from or to."""

    saves: list[tuple[list[str], list[int]]] = field(default_factory=list)
    loads: dict[str, tuple[list[str], list[int]]] = field(default_factory=dict)


class NaiveConnector(KVConnectorBase_V1):
    """Both roles in one class, as vLLM wants it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._rank = vllm_config.parallel_config.rank
        self._ranks = vllm_config.parallel_config.world_size
        self._store = MooncakeDistributedStore()
        address = vllm_config.kv_transfer_config.get_from_extra_config("master_address", "127.0.0.1:50051")
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 26, 1 << 24, "tcp", "", address):
            raise RuntimeError(f"no Mooncake master at {address}")
        self._requests: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}  # leading blocks
        self._pending = Metadata()
        if role == KVConnectorRole.WORKER:
            self._done, self._work = queue.SimpleQueue[str](), queue.SimpleQueue[tuple[Any, ...]]()
            threading.Thread(target=self._transfer, daemon=True).start()

    # -- scheduler side: what is there, what to load, what to save

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_size
        hashes = [h.hex() for h in request.block_hashes[first : (request.num_tokens - 1) // self._block_size]]
        keys = [f"{h}@{rank}" for h in hashes for rank in range(self._ranks)]
        there = self._store.batch_is_exist(keys)
        hits = (there.index(0) if 0 in there else len(there)) // self._ranks
        return hits * self._block_size, hits > 0  # True: load in the background

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            first, count = request.num_computed_tokens // self._block_size, num_external_tokens // self._block_size
            hashes = [h.hex() for h in request.block_hashes[first : first + count]]
            self._pending.loads[request.request_id] = (hashes, blocks.get_block_ids()[0][first : first + count])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._saved[new.req_id] = new.num_computed_tokens // self._block_size
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._blocks[name] = []
            self._blocks[name] += blocks[0] if blocks else []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            first, full = self._saved[name], (computed[name] + count) // self._block_size
            hashes = [h.hex() for h in self._requests[name].block_hashes[first:full]]
            if hashes:
                self._pending.saves.append((hashes, self._blocks[name][first : first + len(hashes)]))
                self._saved[name] = first + len(hashes)
        metadata, self._pending = self._pending, Metadata()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        for known in (self._requests, self._blocks, self._saved):
            known.pop(request.request_id, None)
        return False, None  # the blocks may be freed at once

    # -- rank side: one thread copies

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = list(kv_caches.values())  # the first dimension is the block
        for cache in self._caches:
            self._store.register_buffer(cache.data_ptr(), cache.nbytes)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        for name, job in self._get_connector_metadata().loads.items():
            self._work.put(("get", name, *job))

    def wait_for_save(self) -> None:
        for job in self._get_connector_metadata().saves:
            self._work.put(("put", None, *job))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        return None, {self._done.get() for _ in range(self._done.qsize())}

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object) -> None:
        pass

    def _transfer(self) -> None:
        while True:
            what, name, hashes, blocks = self._work.get()
            keys = [f"{h}@{self._rank}" for h in hashes]
            sizes = [[c.nbytes // c.shape[0] for c in self._caches]] * len(keys)
            addresses = [[c.data_ptr() + b * s for c, s in zip(self._caches, sizes[0], strict=True)] for b in blocks]
            if what == "put":
                self._store.batch_put_from_multi_buffers(keys, addresses, sizes)
            else:
                self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
                self._done.put(name)
