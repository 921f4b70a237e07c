"""kvledger as the suite drives it: on the harness's clock, its compute fence an event on the rank's stream."""

from typing import Any

from kvledger.assembly import Parts
from kvledger.connector import MooncakeLedgerConnector
from kvledger_conformance.engine import stream


class StreamFence:
    """Everything launched before; on a CPU kvledger's own would be nothing, for there the forward has returned."""

    def __init__(self, _device: Any) -> None:
        self._event = stream.recorded()

    def wait(self, *_bound: float) -> None:
        """Until all of it has run."""
        self._event.synchronize()


class DrivenConnector(MooncakeLedgerConnector):
    """kvledger itself; `targets` gives it the parts of each engine."""


def drive(clock: Any) -> None:
    """The next engine's connectors measure time by `clock`."""
    DrivenConnector.parts = Parts(clock=clock, record_fence=StreamFence)  # type: ignore[arg-type]
