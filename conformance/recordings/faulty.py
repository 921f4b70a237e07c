"""kvledger with the faults of a scenario (named by ``STORE_FAULTS``) in its ranks' store clients."""

from __future__ import annotations

import os

from conformance.recordings.scenarios import FAULTS_OF, MANY_CALLS, Scenario, by_name
from demo.faults import Fault, slow
from kvledger.assembly import Parts
from kvledger.connector import MooncakeLedgerConnector
from kvledger.mooncake.client import MooncakeClient, StoreClient


class LostAnswerError(RuntimeError):
    """A call to the store of which nobody knows what it did."""


def scripted(scenario: Scenario, rank: int) -> list[Fault]:
    """The faults of one rank's client."""
    return [
        Fault(
            operation=f.operation,
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

    parts = Parts(
        connect_store=lambda settings, **joins: _faulty(MooncakeClient.connect(settings, **joins), joins["name"])
    )


def _faulty(client: StoreClient, name: str) -> StoreClient:
    if not name.startswith("rank"):
        return client
    return slow(client, name, scripted(by_name(os.environ[FAULTS_OF]), int(name.removeprefix("rank"))))
