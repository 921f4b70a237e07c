"""A connector with the bug that kvledger exists to prevent, for tests only: it lets go of its pins at once.

The audit and the equality check must see what comes of it. If they do not, they see nothing at all.
"""

from collections.abc import Sequence

from kvledger.config import Settings
from kvledger.connector import MooncakeLedgerConnector
from kvledger.groups import GroupPlan
from kvledger.keys import KeySpace
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

    def make_scheduler_side(self, settings: Settings, plan: GroupPlan, keys: KeySpace) -> SchedulerSide:
        good = super().make_scheduler_side(settings, plan, keys)
        kept = {"lookups": good._lookups, "may_save": good._may_save, "trace": good._trace}
        return EarlyReleaseSide(settings=settings, plan=plan, keys=keys, **kept)
