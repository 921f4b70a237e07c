"""What one step tells every rank: the value that `build_connector_meta` hands over. Model: a step's `jobs` in `pipe`."""

from dataclasses import dataclass

from kvledger.protocol.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The jobs emitted in one step, and ids of loads that nobody waits for any more (a rank may drop them, `RankDrop`)."""

    namespace: str
    jobs: tuple[Job, ...] = ()
    cancelled: tuple[int, ...] = ()
    forward: bool = True
    """Whether anything is computed in the step; False in an `EmptyStep`, in which a rank may wait a moment for a report."""
