"""kvledger with the faults of a scenario (named by ``STORE_FAULTS``) in its ranks' store clients."""

from __future__ import annotations

import os

from conformance.recordings.scenarios import FAULTS_OF, MANY_CALLS, Scenario, by_name
from kvledger.config import Settings
from kvledger.connector import MooncakeLedgerConnector
from kvledger.keys import KeySpace
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.faults import Fault, FaultyStore
from kvledger.worker.rank_side import RankSide


class LostAnswerError(RuntimeError):
    """A call to the store of which nobody knows what it did."""


def scripted(scenario: Scenario, rank: int) -> list[Fault]:
    """The faults of one rank's client."""
    return [
        Fault(
            operation=f.operation,  # type: ignore[arg-type]
            call=call,
            code=f.code,
            error=LostAnswerError("scripted") if f.code is None else None,
            positions=frozenset(f.positions) or None,
        )
        for f in scenario.faults
        if f.rank in (None, rank)
        for call in range(f.first, MANY_CALLS, f.every)
    ]


class FaultyConnector(MooncakeLedgerConnector):
    """The connector itself; only its ranks' clients lie now and then."""

    def make_rank_side(self, settings: Settings, keys: KeySpace) -> RankSide:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = int(get_tensor_model_parallel_rank())
        client = MooncakeClient.connect(
            settings, segment_bytes=settings.rank_segment_bytes, buffer_bytes=0, name=f"rank{rank}"
        )
        faulty = FaultyStore(
            client, delay_s=settings.fault_delay_ms / 1000, faults=scripted(by_name(os.environ[FAULTS_OF]), rank)
        )
        return RankSide(settings=settings, rank=rank, keys=keys, client=faulty)
