"""An engine without a model: vLLM's real scheduler, block pool and aggregator around the real connector and store.

Only the forward is replaced, by arithmetic that behaves like attention where it matters: the KV of a position is a
function of its token and of the KV *found in the cache* at the position before. So wrong bytes spread, into
everything computed on them and into the sampled tokens, exactly as they would in a model; and what is right is known
for every prefix.

Hooks are called in the order of vLLM's model runner V1 (`_get_kv_connector_output`); metadata is pickled between roles.
"""

import itertools
import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from demo.faults import FaultyStore
from kvledger.config import Settings
from kvledger.connector import MooncakeLedgerConnector
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace, parse_key
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import EmbeddedStore, list_keys
from kvledger.scheduler.side import SchedulerSide
from kvledger.worker.rank_side import RankSide

MASK = (1 << 62) - 1
LAYERS = ("layer0", "layer1")
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def cell(previous: int, token: int) -> int:
    """KV of one position."""
    x = (previous * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK
    return (x ^ (x >> 29)) & MASK


def seed_of(layer: int, rank: int) -> int:
    """What stands before position 0."""
    return cell(layer + 17, rank + 23)


def expected_cells(tokens: Sequence[int], layer: int, rank: int) -> list[int]:
    """The right KV of every position of a prefix."""
    cells, previous = [], seed_of(layer, rank)
    for token in tokens:
        previous = cell(previous, token)
        cells.append(previous)
    return cells


def next_token(last_cell: int) -> int:
    """What the engine samples after a position."""
    return 3 + last_cell % 500


def right_output(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that a prompt must lead to."""
    tokens = list(prompt)
    previous = expected_cells(tokens, 0, 0)[-1]
    out = []
    for _ in range(count):
        out.append(next_token(previous))
        previous = cell(previous, out[-1])
    return out


class ConnectorUnderTest(MooncakeLedgerConnector):
    """kvledger with its store clients wrapped for faults, and the rank set by the test."""

    rank_to_build = 0

    def make_scheduler_side(self, settings: Settings, plan: GroupPlan, keys: KeySpace) -> SchedulerSide:
        side = super().make_scheduler_side(settings, plan, keys)
        if side._lookups is not None:
            self.lookup_store = FaultyStore(side._lookups._client)
            side._lookups._client = self.lookup_store
        return side

    def make_rank_side(self, settings: Settings, keys: KeySpace) -> RankSide:
        rank = type(self).rank_to_build
        self.raw_store = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name=f"rank{rank}")
        self.store = FaultyStore(self.raw_store)
        return RankSide(settings=settings, rank=rank, keys=keys, client=self.store)


def make_config(
    folder: Path, extra: dict[str, Any], *, ranks: int, max_model_len: int, role: str = "kv_both", **engine: Any
) -> VllmConfig:
    """A vLLM configuration of a small model, without devices or processes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL))
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=max_model_len,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ConnectorUnderTest",
            kv_connector_module_path=__name__,
            kv_role=role,
            kv_connector_extra_config=extra,
        ),
        **engine,
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = ranks
    return config


@dataclass
class Rank:
    """One rank: its connector and its KV cache, (blocks, tokens per block) of int64 per layer."""

    index: int
    connector: ConnectorUnderTest
    caches: dict[str, torch.Tensor]


@dataclass
class Engine:
    """See the module's docstring. Build with `make_engine`."""

    scheduler: Scheduler
    ranks: list[Rank]
    block_size: int
    aggregator: KVOutputAggregator
    store: EmbeddedStore
    hasher: Callable[[Request], list[Any]]
    requests: dict[str, Request] = field(default_factory=dict)
    prefixes: dict[bytes, list[int]] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    on_forward: Callable[[SchedulerOutput], None] | None = None

    @property
    def connector(self) -> "ConnectorUnderTest":
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **kwargs: Any) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kwargs)
        request = Request(request_id, list(prompt), params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # -- a step ------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        begin = time.monotonic()
        output = self.scheduler.schedule()
        scheduled = time.monotonic() - begin
        results = [self._run_rank(rank, output) for rank in self.ranks]
        result = results[0] if len(results) == 1 else self.aggregator.aggregate(results)
        begin = time.monotonic()
        self.scheduler.update_from_output(output, result)
        self.step_seconds.append(scheduled + time.monotonic() - begin)
        self._note_prefixes()
        return output

    def _run_rank(self, rank: Rank, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        connector = rank.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        sampled = self._forward(rank, output)
        if self.on_forward is not None:
            self.on_forward(output)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        transfers = connector.get_transfer_results(output.finished_req_ids)
        kv = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            kv_connector_output=kv,
        )

    def _forward(self, rank: Rank, output: SchedulerOutput) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        manager = self.scheduler.kv_cache_manager
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            # schedule() has advanced num_computed_tokens already.
            stop = request.num_computed_tokens
            start = stop - count
            table = manager.get_block_ids(request_id)[0]
            last = 0
            for layer, name in enumerate(LAYERS):
                cache = rank.caches[name]
                previous = (
                    seed_of(layer, rank.index) if start == 0 else int(cache[self._place(table, start - 1)].item())
                )
                for position in range(start, stop):
                    previous = cell(previous, request.all_token_ids[position])
                    cache[self._place(table, position)] = previous
                if layer == 0:
                    last = previous
            done = stop >= request.num_tokens
            sampled[request_id] = [next_token(last)] if done else []
        return sampled

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def _note_prefixes(self) -> None:
        for request in self.requests.values():
            for i, h in enumerate(request.block_hashes):
                if bytes(h) not in self.prefixes:
                    self.prefixes[bytes(h)] = list(request.all_token_ids[: (i + 1) * self.block_size])

    # -- running -----------------------------------------------------------

    def run(self, until: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Step until the condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {len(self.step_seconds)} steps: {self.connector.snapshot()}")
            if not self.step().num_scheduled_tokens:
                time.sleep(0.001)  # what EngineCore does after a step that executed nothing

    def run_to_idle(self, *, timeout_s: float = 30.0) -> None:
        """Step until vLLM itself would stop stepping."""
        self.run(lambda: not self.scheduler.has_requests(), timeout_s=timeout_s)

    def output(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].output_token_ids)

    def assert_right(self) -> None:
        """Every finished request has the right tokens, nothing is held, and the store holds no wrong byte."""
        for request_id, request in self.requests.items():
            if request.status is not RequestStatus.FINISHED_ABORTED:
                prompt = list(request.prompt_token_ids)
                assert self.output(request_id) == right_output(prompt, request.max_tokens), request_id
        self.assert_idle()
        assert self.poisoned() == []

    def assert_idle(self) -> None:
        """Block references are back to none, and no per-request entry is left on either side."""
        held = [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        assert held == []
        snapshot = self.connector.snapshot()
        assert (snapshot["blocks_pinned"], snapshot["open_jobs"], snapshot["generations"]) == (0, 0, 0)
        side = self.connector.scheduler_side
        assert not side._asked
        assert not side._failed_hits
        assert len(side._admissions) == 0
        for rank in self.ranks:
            assert rank.connector.rank_side.wait_idle(0.0)

    def stored_keys(self) -> list[str]:
        """Keys of this engine's namespace in the store."""
        prefix = self.connector.scheduler_side._keys.prefix()
        return [k for k in list_keys(self.store.metrics_port) if k.startswith(prefix[:-1])]

    def poisoned(self) -> list[str]:
        """Keys whose stored bytes are not what their block hash stands for."""
        reader = self.ranks[0].connector.raw_store
        size = len(LAYERS) * self.block_size * 8
        buffer = torch.zeros(size, dtype=torch.uint8)
        reader.register(buffer.data_ptr(), size)
        wrong = []
        for key in self.stored_keys():
            parsed = parse_key(key)
            tokens = self.prefixes.get(parsed.block_hash)
            read = reader.get([key], [[buffer.data_ptr()]], [[size]])[0]
            if tokens is None or read != size:
                wrong.append(key)
                continue
            expected = [expected_cells(tokens, i, parsed.shard)[-self.block_size :] for i in range(len(LAYERS))]
            if buffer.view(torch.int64).tolist() != list(itertools.chain.from_iterable(expected)):
                wrong.append(key)
        reader.unregister(buffer.data_ptr())
        return wrong

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()


def make_engine(
    folder: Path,
    store: EmbeddedStore,
    *,
    ranks: int = 1,
    num_blocks: int = 33,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    role: str = "kv_both",
    connector: type[ConnectorUnderTest] = ConnectorUnderTest,
    **extra: Any,
) -> Engine:
    """Scheduler and ranks in the order in which vLLM builds them: ranks first."""
    init_none_hash(sha256)
    settings: dict[str, Any] = {
        "master_server_address": store.master_address,
        "mode": "standalone-store",
        "staging_bytes": "1MiB",
        "max_batch_bytes": "64KiB",
        "shutdown_timeout_s": 5.0,
        "lookup_wait_s": 0.5,
        **extra,
    }
    config = make_config(
        folder,
        settings,
        ranks=ranks,
        max_model_len=max_model_len,
        role=role,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.kv_transfer_config.kv_connector = connector.__name__
    config.kv_transfer_config.kv_connector_module_path = connector.__module__
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache_config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]
    )
    built = []
    for index in range(ranks):
        connector.rank_to_build = index
        worker = connector(config, KVConnectorRole.WORKER, cache_config)
        caches = {n: torch.zeros((num_blocks, block_size), dtype=torch.int64) for n in LAYERS}
        worker.register_kv_caches(caches)
        built.append(Rank(index, worker, caches))
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )
    return Engine(
        scheduler=scheduler,
        ranks=built,
        block_size=block_size,
        aggregator=KVOutputAggregator.from_connector(scheduler.connector, ranks),
        store=store,
        hasher=get_request_block_hasher(block_size, sha256),
    )
