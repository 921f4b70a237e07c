"""By mutant of the model: the patch with which its counterexample goes through on kvledger, driven by the adapter."""

from collections.abc import Iterator

from conformance.refinement.twins.patches import PATCHES
from conformance.refinement.twins.patching import Patch, Swap, named_patch
from kvledger.protocol import RankLedger

LEDGER_PATCHES: dict[str, Patch] = {
    name: PATCHES[name]
    for name in (
        "no-pins", "no-pins-poison", "tail-not-pinned", "release-on-success-only", "unbounded-pins", "count-per-request",
        "late-report-to-new-job", "release-at-first-rank", "report-counted-twice", "rank-reports-twice", "raise-before-try",
        "lost-load-completion", "no-report-on-failure", "failed-load-of-one-rank-lost", "failed-block-believed-stored",
        "miss-not-forgotten", "failed-hit-outlives-request", "store-on-failed-load", "store-on-shared-load",
        "failed-sync-load-not-tainted", "old-retry-in-new-table", "resume-deletes-tracker", "load-job-not-sent",
        "hit-offered-again", "reset-keeps-keys", "quiesce-with-pins", "push-work-for-ever", "waits-for-nothing",
        "load-under-running-step",
    )
} | {
    "store-drafts": PATCHES["store-partial-blocks"],
    "load-over-at-first-rank": PATCHES["release-at-first-rank"],
    "retry-of-nothing-issued": PATCHES["old-retry-in-new-table"],
    "resume-loses-load": PATCHES["resume-deletes-tracker"],
    "load-under-running-step-overwrites": PATCHES["load-under-running-step"],
    "reset-without-fence": PATCHES["reset-keeps-keys"],
    "budget-ignored": PATCHES["unbounded-pins"],
}  # fmt: skip


@named_patch(LEDGER_PATCHES, "release-on-timeout")
def release_on_timeout() -> Iterator[Swap]:
    """A job counts as over as soon as its call gives up, whatever its bytes do."""
    expire = RankLedger.expire

    def expire_now(self: RankLedger, now: float) -> list[int]:
        for entry in self._jobs.values():
            entry.until = now
        return expire(self, now)

    yield RankLedger, "expire", expire_now


for _mutant in ("timeout-dma-without-job", "late-get-after-report", "late-get-against-the-map", "late-get-on-one-rank"):
    LEDGER_PATCHES[_mutant] = LEDGER_PATCHES["release-on-timeout"]

FENCE = "the compute fence is in the worker (worker/fence.py, rank_side.py); the ledgers are not asked when a transfer may begin"
WAITS = "the wait for a synchronous load is in the worker (worker/rank_side.py); the ledgers only learn how it ended"
INDUCTION = "module MCInd: one step from any state of the invariant, not a behaviour that begins at the start"
CORE = "the wrong version changes what core does with the blocks, and core's choices come from the counterexample"
OUT_OF_REACH = {
    "store-before-fence": FENCE,
    "wrong-bytes-against-the-map": FENCE,
    "sync-load-goes-on": WAITS,
    "sync-load-hits-freed-block": WAITS,
    "unloaded-reported-good": "which blocks a transfer proves is decided in worker/transfer.py; to the ledgers it is an input",
    "abort-frees-target": CORE,
    "aborted-load-never-freed": CORE,
    "makes-room-for-the-preempted": CORE,
    "ind-no-pins": INDUCTION,
    "ind-no-fence": INDUCTION,
    "ind-release-at-first-rank": INDUCTION,
    "ind-release-on-timeout": INDUCTION,
}
"""Mutants whose counterexample cannot be replayed at this level, and why."""
