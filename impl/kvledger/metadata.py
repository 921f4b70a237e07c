"""What crosses vLLM's process boundary: a step's plan to the ranks, the ranks' reports back."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvledger.errors import ProtocolError
from kvledger.protocol import Report, StepPlan


@dataclass
class LedgerMetadata(KVConnectorMetadata):
    """Scheduler side → every rank: the step's plan, nothing else."""

    plan: StepPlan


@dataclass
class LedgerWorkerMetadata(KVConnectorWorkerMetadata):
    """Ranks → scheduler side: reports, folded over ranks by vLLM's aggregator."""

    reports: list[Report] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both sides' reports. A new object: the aggregator may hand over rank 0's own.

        Raises:
            ProtocolError: `other` is another connector's.
        """
        if not isinstance(other, LedgerWorkerMetadata):
            raise ProtocolError(f"cannot aggregate with {type(other).__name__}", action="ApplyReport")
        return LedgerWorkerMetadata([*self.reports, *other.reports])
