"""Twins that need two steps in flight."""

from collections.abc import Iterator

from conformance.refinement.twins.patching import Patch, Swap, named_patch
from kvledger import assembly
from kvledger.protocol import Job, Kind
from kvledger.worker.fence import Fence
from kvledger.worker.transfer import Transfer

DEPTH_PATCHES: dict[str, Patch] = {}


@named_patch(DEPTH_PATCHES, "load-under-running-step")
def load_under_running_step() -> Iterator[Swap]:
    """A producer loads under asynchronous scheduling, and no load waits for the steps before it: the target may be a
    block that one of them still writes. (Either guard alone is enough.)"""
    run = Transfer.run

    def unordered(self: Transfer, job: Job, fence: Fence) -> None:
        run(self, job, fence if job.kind is Kind.STORE else Fence(None))

    yield assembly, "may_load", lambda **_start: True
    yield Transfer, "run", unordered


@named_patch(DEPTH_PATCHES, "sync-load-under-next-step")
def sync_load_under_next_step() -> Iterator[Swap]:
    """Synchronous loads although the next step is scheduled before a failure is known."""
    yield assembly, "check_pipeline", lambda _settings, _steps_in_flight: None
