"""Differences between vLLM releases 0.27.1, 0.28 and 0.32, in one place: configuration, hook order, small APIs.

Nothing here knows a connector. Each function says what differs and since when.
"""

import contextlib
import copy
import functools
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from kvledger_conformance.engine import stream
from kvledger_conformance.engine.oracle import LAYERS
from kvledger_conformance.suite.properties import Impossible

VLLM_VERSION = str(vllm.__version__).partition("+")[0]
DEPTH_FROM = (0, 32)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the engine under test is, and what its world does. Small numbers make collisions.

    `reuse_ids`: when the id of a finished request may come back: "at once"; "later", when a schedule has told the
    connector of the end; "never". vLLM's front end makes ids unique unless that is switched off. With two steps in
    flight an id never comes back before the last step that computes for it: core itself cannot tell the two apart.
    """

    ranks: int = 1
    num_blocks: int = 15
    block_size: int = 4
    max_model_len: int = 32
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    role: str = "kv_both"
    reuse_ids: str = "at once"
    depth: int = 1
    """Steps in flight: 2 is vLLM with asynchronous scheduling."""
    load_failures: str = "recompute"
    """`kv_load_failure_policy`; vLLM's own default, "fail", ends requests, which no cache may cost."""
    layers: tuple[str, ...] = LAYERS
    cell_floats: int = 1
    """A token of a layer takes two times as many floats: its keys and its values."""


@functools.cache
def _base_config(shape: Shape) -> VllmConfig:
    """A vLLM configuration without devices or processes; slow to make, so made once per shape."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_MODEL))
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=32,
            max_model_len=shape.max_model_len,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
        ).create_engine_config()
    config.model_config.model = "tiny"  # connectors name objects after it: engines of several shapes share a store
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.world_size = shape.ranks
    config.cache_config.block_size = shape.block_size
    config.cache_config.num_gpu_blocks = shape.num_blocks
    if shape.depth > 1:
        _make_asynchronous(config, shape.depth)
    return config


def _make_asynchronous(config: VllmConfig, depth: int) -> None:
    """Asynchronous scheduling. Its loop is driven from 0.32 on.

    Raises:
        Impossible: an older release, or a depth that this one does not have.
    """
    if tuple(map(int, VLLM_VERSION.split(".")[:2])) < DEPTH_FROM:
        raise Impossible(f"two steps in flight are driven on vLLM {'.'.join(map(str, DEPTH_FROM))} and later")
    config.scheduler_config.async_scheduling = True
    if config.max_concurrent_batches != depth:
        raise Impossible(f"this vLLM has {config.max_concurrent_batches} steps in flight, not {depth}")


@functools.cache
def _structured(shape: Shape) -> StructuredOutputManager:
    return StructuredOutputManager(_base_config(shape))


def make_config(shape: Shape, connector: str, module: str | None, extra: dict[str, Any], rank: int = 0) -> VllmConfig:
    """The configuration that one process of the engine sees."""
    config = copy.copy(_base_config(shape))
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.rank = rank
    config.cache_config = copy.copy(config.cache_config)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role=shape.role,
        kv_connector_extra_config=dict(extra),
        kv_load_failure_policy=shape.load_failures,
    )
    if not KVConnectorFactory.supports_hma_config(config.kv_transfer_config):  # as vLLM decides it at its start
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    return config


def make_cache_config(shape: Shape) -> KVCacheConfig:
    """One full-attention group; a block of a layer has one cell per token, of 8 bytes unless the shape asks for more."""
    spec = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=1, head_size=shape.cell_floats, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(shape.layers), spec)],
    )


def make_scheduler(shape: Shape, config: VllmConfig) -> Scheduler:
    """vLLM's scheduler, which builds the scheduler-side connector itself."""
    chosen: Any = config.scheduler_config.get_scheduler_cls() if shape.depth > 1 else Scheduler
    made: Scheduler = chosen(
        vllm_config=config,
        kv_cache_config=make_cache_config(shape),
        structured_output_manager=_structured(shape),
        block_size=shape.block_size,
        log_stats=True,
    )
    return made


def make_hasher(block_size: int) -> Callable[[Any], list[Any]]:
    """Block hashes as vLLM makes them. The seed is random per process before 0.32; the replays want it fixed."""
    os.environ.setdefault("PYTHONHASHSEED", "0")
    kv_cache_utils.init_none_hash(sha256)
    hasher: Callable[[Any], list[Any]] = kv_cache_utils.get_request_block_hasher(block_size, sha256)
    return hasher


@contextlib.contextmanager
def cpu_worker(compute: stream.Stream | None = None) -> Iterator[None]:
    """What a worker process looks like to a connector; events recorded inside are of this stream."""
    with mock.patch.object(torch.cuda, "Event", stream.Event), stream.on(compute):
        yield


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Inside the block this process is `rank` of `ranks` tensor-parallel ranks."""

    def group(index: int, size: int) -> Any:
        return SimpleNamespace(
            rank_in_group=index, rank=index, local_rank=index, world_size=size, ranks=list(range(size)),
            is_first_rank=index == 0, is_last_rank=index == size - 1,
        )  # fmt: skip

    names = {"_TP": group(rank, ranks), "_PP": group(0, 1), "_DCP": group(0, 1), "_PCP": group(0, 1)}
    with mock.patch.multiple(parallel_state, create=True, **names):
        yield


def metadata_for(output: SchedulerOutput, ranks: int) -> Any:
    """A step's metadata as a rank sees it: by reference in one process, pickled towards several."""
    metadata = output.kv_connector_metadata
    return metadata if ranks == 1 else pickle.loads(pickle.dumps(metadata))


def run_hooks(
    connector: Any,
    output: SchedulerOutput,
    metadata: Any,
    forward: Callable[[], None],
    before_collect: Callable[[], None],
) -> KVConnectorOutput:
    """One step on one rank, in the order of vLLM's model runner.

    0.27 and 0.28 start loads before the forward, skip `wait_for_save` on empty steps and collect with `get_finished`;
    from 0.29 on loads start after the forward unless it needs them, and `get_transfer_results` collects. Like the
    runner, this collects from a `finally`, so also when the forward raised.
    """
    modern = hasattr(connector, "get_transfer_results")
    empty = not output.num_scheduled_tokens
    late_start = modern and not getattr(output, "has_sync_kv_loads", False)
    result = KVConnectorOutput()
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    if not late_start:
        connector.start_load_kv(None)
    try:
        forward()
    finally:
        if late_start:
            connector.start_load_kv(None)
        if modern or not empty:
            connector.wait_for_save()
        before_collect()
        if modern:
            transfers = connector.get_transfer_results(output.finished_req_ids)
            result.finished_sending = transfers.finished_sending
            result.finished_recving = transfers.finished_recving
            result.failed_recving = transfers.failed_recving
        else:
            result.finished_sending, result.finished_recving = connector.get_finished(output.finished_req_ids)
        result.invalid_block_ids = connector.get_block_ids_with_load_errors()
        result.kv_connector_stats = connector.get_kv_connector_stats()
        result.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        result.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
    return result


def samples(request: Any) -> bool:
    """Whether the step just scheduled ends with a token for this request: it reaches the last token, or its place."""
    places = getattr(request, "num_output_placeholders", 0)
    return bool(request.num_computed_tokens >= request.num_tokens + max(0, places - 1))


def runner_output(sampled: dict[str, list[int]], transfers: KVConnectorOutput) -> ModelRunnerOutput:
    """What the model runner answers to one step."""
    ids = list(sampled)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={r: i for i, r in enumerate(ids)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=transfers,
    )
