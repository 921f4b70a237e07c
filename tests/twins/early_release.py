"""A connector with the bug that kvledger exists to prevent, for tests only: it lets go of its pins at once.

The audit and the equality check must see what comes of it. If they do not, they see nothing at all.
"""

from collections.abc import Sequence

from demo.faults import connect_slow_store
from kvledger.assembly import Parts
from kvledger.connector import MooncakeLedgerConnector
from kvledger.protocol import Job
from kvledger.scheduler.side import SchedulerSide


class EarlyReleaseSide(SchedulerSide):
    """Takes each job's block references and gives them back in the same breath; the ledger does not know."""

    def _pin(self, job: Job) -> None:
        super()._pin(job)
        super()._release(tuple(reversed(job.block_ids)))

    def _release(self, block_ids: Sequence[int]) -> None:
        """Nothing is left to release."""

    def has_pending_block_frees(self) -> bool:
        return False


class EarlyReleaseConnector(MooncakeLedgerConnector):
    """kvledger, but with `EarlyReleaseSide`."""

    parts = Parts(connect_store=connect_slow_store, scheduler_side=EarlyReleaseSide)
