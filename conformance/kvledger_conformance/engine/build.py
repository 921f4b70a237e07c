"""Building an engine around a connector, in vLLM's order: ranks first, then the scheduler."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger_conformance.engine import compat
from kvledger_conformance.engine.engine import Engine, VirtualClock
from kvledger_conformance.engine.memory import Rank
from kvledger_conformance.store.world import World


def build_engine(
    kind: type[Engine],
    shape: compat.Shape,
    world: World,
    clock: VirtualClock,
    connector_class: Any,
    config: Callable[..., Any],
) -> Engine:
    """An engine of class `kind`; `config` makes the vLLM configuration of a rank."""
    ranks: list[Rank] = []
    try:
        for index in range(shape.ranks):
            world.building = f"rank{index}"
            with compat.as_rank(index, shape.ranks), compat.cpu_worker():
                cache = compat.make_cache_config(shape)
                connector = connector_class(config(rank=index), KVConnectorRole.WORKER, cache)
                ranks.append(Rank.build(index, connector, shape.num_blocks, shape.block_size))
        world.building = "lookup"
        with compat.as_rank(0, shape.ranks):
            scheduler = compat.make_scheduler(shape, config())
    except BaseException:
        for rank in ranks:
            rank.connector.shutdown()
        raise
    aggregator = KVOutputAggregator.from_connector(scheduler.connector, shape.ranks)
    engine = kind(shape, world, clock, scheduler, ranks, aggregator, compat.make_hasher(shape.block_size))
    if shape.depth > 1:
        from kvledger_conformance.engine.core import AsyncCore, Workers

        engine.core = AsyncCore(scheduler.vllm_config, scheduler, Workers(engine.launch))
    return engine
