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
    shape: compat.Shape,
    world: World,
    clock: VirtualClock,
    make_connector: Callable[[KVConnectorRole, int], Any],
    make_scheduler: Callable[[], Any],
    note: Callable[[str], None],
    kind: type[Engine] = Engine,
) -> Engine:
    """Ranks first, then the scheduler, as vLLM builds them."""
    ranks: list[Rank] = []
    try:
        for index in range(shape.ranks):
            world.building = f"rank{index}"
            with compat.as_rank(index, shape.ranks), compat.cpu_worker():
                connector = make_connector(KVConnectorRole.WORKER, index)
                ranks.append(Rank.build(index, connector, shape.num_blocks, shape.block_size))
        world.building = "lookup"
        with compat.as_rank(0, shape.ranks):
            scheduler = make_scheduler()
    except BaseException:
        for rank in ranks:
            rank.connector.shutdown()
        raise
    engine = kind(
        shape=shape,
        world=world,
        clock=clock,
        scheduler=scheduler,
        ranks=ranks,
        aggregator=KVOutputAggregator.from_connector(scheduler.connector, shape.ranks),
        hasher=compat.make_hasher(shape.block_size),
        note=note,
    )
    if shape.depth > 1:
        from kvledger_conformance.engine.core import AsyncCore, Workers

        engine.core = AsyncCore(scheduler.vllm_config, scheduler, Workers(engine.launch))
    return engine
