"""Each historic bug as a patch on kvledger: the suite must kill every one, and says by which layer.

A twin has the id of the model's mutant that stands for the same bug (`spec/mutants/registry.toml`). It is killed by
the first scenario or machine that breaks a property on it; the unpatched connector breaks none, which is checked too.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from conformance.refinement import predicates
from conformance.refinement.twins.patches import PATCHES
from kvledger_conformance.suite import machines, targets
from kvledger_conformance.suite.driver import replay
from kvledger_conformance.suite.properties import Impossible, Violation
from kvledger_conformance.suite.scenarios import SCENARIOS


@dataclass(frozen=True, slots=True)
class Twin:
    """`mutant`: the model's mutants it is the twin of. `first`: the scenario that kills it, tried first."""

    id: str
    mutant: tuple[str, ...]
    target: str
    first: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def patch(self) -> Callable[[], AbstractContextManager[Any]]:
        """Puts the bug in."""
        return PATCHES[self.id]

    @property
    def mechanism(self) -> str:
        """What the bug does."""
        return (self.patch.__doc__ or "").strip()


DIRECT, STAGED, SYNC = "kvledger-direct", "kvledger", "kvledger-sync"
PREEMPTED = "blocks of a preempted request under a running store"
OVERTAKES = "second job of a request overtakes the first on one rank"
BAD_LOAD = "middle block of a load fails on one rank"
UNDER_STEP = "two steps in flight: a producer loads into a block that a stopped request's step still writes"

TWINS = (
    Twin("no-pins", ("no-pins", "ind-no-pins"), DIRECT, PREEMPTED),
    Twin("no-pins-poison", ("no-pins-poison",), STAGED, PREEMPTED),
    Twin("count-per-request", ("count-per-request",), DIRECT, OVERTAKES),
    Twin("late-report-to-new-job", ("late-report-to-new-job",), DIRECT, "the same with two ranks at different speeds"),
    Twin(
        "release-at-first-rank",
        ("release-at-first-rank", "ind-release-at-first-rank", "load-over-at-first-rank"),
        DIRECT,
        OVERTAKES,
    ),
    Twin("no-report-on-failure", ("no-report-on-failure",), STAGED, "put raises, then answers None"),
    Twin("release-on-success-only", ("release-on-success-only",), STAGED, "existence check raises"),
    Twin("raise-before-try", ("raise-before-try",), STAGED, "existence check raises"),
    Twin("report-counted-twice", ("report-counted-twice",), DIRECT, OVERTAKES),
    Twin("rank-reports-twice", ("rank-reports-twice",), STAGED, "existence check raises"),
    Twin("tail-not-pinned", ("tail-not-pinned",), DIRECT, PREEMPTED),
    Twin(
        "release-on-timeout",
        ("release-on-timeout", "timeout-dma-without-job", "ind-release-on-timeout"),
        DIRECT,
        "late put: the call gave up, its bytes still move",
    ),
    Twin(
        "late-get-after-report",
        ("late-get-after-report", "late-get-against-the-map", "late-get-on-one-rank"),
        DIRECT,
        "late get: the call gave up, its bytes still arrive",
    ),
    Twin(
        "store-before-fence",
        ("store-before-fence", "ind-no-fence", "wrong-bytes-against-the-map"),
        STAGED,
        "transfers run as soon as they are told",
    ),
    Twin("store-partial-blocks", ("store-drafts",), STAGED, "a request longer than a step"),
    Twin("store-on-failed-load", ("store-on-failed-load",), SYNC, "a failed load that others share"),
    Twin("store-on-shared-load", ("store-on-shared-load",), SYNC, "a failed load that others share"),
    Twin("sync-load-goes-on", ("sync-load-goes-on", "sync-load-hits-freed-block"), SYNC, BAD_LOAD),
    Twin(
        "old-retry-in-new-table",
        ("old-retry-in-new-table", "retry-of-nothing-issued"),
        STAGED,
        "a failed store of a preempted request",
    ),
    Twin(
        "resume-deletes-tracker",
        ("resume-deletes-tracker", "resume-loses-load"),
        STAGED,
        "same-step resume that hits the store",
    ),
    Twin(
        "unloaded-reported-good",
        ("unloaded-reported-good",),
        STAGED,
        "first part of a load fails on the second rank",
        (("max_batch_bytes", 64),),
    ),
    Twin("failed-load-of-one-rank-lost", ("failed-load-of-one-rank-lost",), STAGED, "short list from a get"),
    Twin("lost-load-completion", ("lost-load-completion",), STAGED, BAD_LOAD),
    Twin("load-job-not-sent", ("load-job-not-sent",), STAGED, "short list from a get"),
    Twin("hit-offered-again", ("hit-offered-again",), STAGED, "load whose key is gone, over and over"),
    Twin("abort-frees-target", ("abort-frees-target",), DIRECT, "abort while a load is out"),
    Twin("aborted-load-never-freed", ("aborted-load-never-freed",), STAGED, "two loads, the queued one aborted"),
    Twin("quiesce-with-pins", ("quiesce-with-pins",), STAGED, "a store that outlives its request"),
    Twin("push-work-for-ever", ("push-work-for-ever",), STAGED, "a store that outlives its request"),
    Twin("waits-for-nothing", ("waits-for-nothing",), STAGED, "more requests than blocks"),
    Twin("reset-keeps-keys", ("reset-keeps-keys",), STAGED, "new weights under the same hashes"),
    Twin("unbounded-pins", ("unbounded-pins", "budget-ignored"), STAGED, "silent store and a full pool"),
    Twin(
        "load-under-running-step",
        ("load-under-running-step", "load-under-running-step-overwrites"),
        DIRECT,
        UNDER_STEP,
    ),
    Twin(
        "sync-load-under-next-step",
        (),
        SYNC,
        "two steps in flight: a synchronous load fails when the next step is scheduled already",
    ),
    Twin("short-list-believed", (), STAGED, "short list from a get"),
    Twin("slot-not-quarantined", (), STAGED, "late bytes in memory that another load uses by now"),
    Twin("bad-blocks-stay-cached", (), SYNC, "a failed load whose request is aborted before it computes again"),
    Twin("publish-after-failed-forward", (), STAGED, "the forward raises while saves are told"),
)

BY_TOUR = {
    "no-pins": "store",
    "tail-not-pinned": "store",
    "count-per-request": "order",
    "late-report-to-new-job": "twojobs",
    "release-at-first-rank": "ranks",
    "failed-block-believed-stored": "store",
    "no-report-on-failure": "store",
    "release-on-success-only": "store",
    "raise-before-try": "store",
    "report-counted-twice": "ranks",
    "rank-reports-twice": "store",
    "release-on-timeout": "store",
    "store-drafts": "budget",
    "store-on-failed-load": "sync",
    "old-retry-in-new-table": "retry",
    "resume-deletes-tracker": "reset",
    "hit-offered-again": "load",
    "load-job-not-sent": "load",
    "miss-not-forgotten": "load",
    "failed-hit-outlives-request": "load",
    "failed-sync-load-not-tainted": "sync",
    "quiesce-with-pins": "store",
    "push-work-for-ever": "store",
    "waits-for-nothing": "store",
    "reset-keeps-keys": "reset",
    "unbounded-pins": "budget",
}
"""Mutants whose twin at the level of the ledgers (`in_adapter`) the tour or refusal sweep of this slice must kill.
Two more need a larger graph: `store-on-shared-load` is killed in the nightly slice `shared`; `load-under-running-step` needs
loads, a producer and two steps in flight together, and is killed by a scenario."""

NOT_TWINNED = {
    "failed-sync-load-not-tainted": "what it breaks is a store that reads a block while core computes the same bytes into it once "
    "more; no scenario leads there. Its counterexample is replayed (two-sided), and the tour of slice sync kills it",
    "failed-block-believed-stored": "it costs hits and nothing else, and no property of the contract says what must be stored; its "
    "counterexample is replayed (two-sided), and the tour of slice store kills it",
    "miss-not-forgotten": "it costs hits and nothing else, as above; its counterexample is replayed (two-sided), and the tour of "
    "slice load kills it",
    "failed-hit-outlives-request": "as above",
    "makes-room-for-the-preempted": "a wrong core, not a wrong connector",
    "reset-without-fence": "core refuses a reset while a job holds references, so no job is in flight at a reset; its "
    "counterexample is replayed all the same (two-sided), where core may go on",
}
"""Mutants of the model without a twin, and why."""


def run_all(*, say: Callable[[str], None] = lambda _line: None, chosen: str | None = None) -> list[dict[str, Any]]:
    """Try to kill every twin. One row each: id, mutants, killed, by (layer and place), property, steps."""
    rows = []
    for twin in TWINS:
        if chosen is not None and chosen != twin.id:
            continue
        row = kill(twin)
        rows.append(row)
        verdict = f"killed by {row['by']}: {row['property']}" if row["killed"] else "SURVIVES"
        say(f"twin  {twin.id:30} {verdict}")
    return rows


def kill(twin: Twin) -> dict[str, Any]:
    """Run the layers in order until one breaks a property."""
    target = targets.find(twin.target).with_options(**dict(twin.options))
    # what a contract-level suite sees counts first; the look inside only if nothing else does
    for level, chosen in (
        ("contract", dataclasses.replace(target, refine=None)),
        ("refinement", dataclasses.replace(target, refine=predicates.check)),
    ):
        for by, violation in _attempts(twin, chosen, machines_too=level == "refinement"):
            if violation is not None:
                return {
                    "id": twin.id,
                    "mutants": list(twin.mutant),
                    "mechanism": twin.mechanism,
                    "killed": True,
                    "by": f"{by} ({level})" if violation.name == "refines-the-model" else by,
                    "property": violation.name,
                    "what": violation.what,
                    "steps": len(violation.script),
                }
    return {"id": twin.id, "mutants": list(twin.mutant), "mechanism": twin.mechanism, "killed": False, "by": "",
            "property": "", "what": "", "steps": 0}  # fmt: skip


def _attempts(twin: Twin, target: targets.Target, *, machines_too: bool) -> Iterator[tuple[str, Violation | None]]:
    for scenario in sorted(SCENARIOS, key=lambda s: s.name != twin.first):
        with twin.patch(), contextlib.suppress(Impossible):
            yield f"scenario: {scenario.name}", replay(target, scenario.shape, scenario.script)
    if machines_too:
        for name in machines.MACHINES:
            with twin.patch():
                yield f"machine: {name}", machines.run_machine(machines.machine_for(name, target), "dev")
