"""The state in the model's words: frozen values that `Ledger.view()` and `RankLedger.view()` return.

What may live here: values. They are the one abstraction function: tours, the walk at vLLM's interface, the model's
predicates and its bad states read them, and nothing else of a ledger's inside. Field names are the model's variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvledger.protocol.jobs import Job, Life, Report
from kvledger.protocol.tracker import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobView:
    """`job` and its entry of `led`. `items[p]` is the request's block index of position p (stores)."""

    job: Job
    req: str
    items: tuple[int, ...]
    held: tuple[int, ...]
    """Blocks that the job pins."""
    rep: frozenset[int]
    """Ranks that have reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerView:
    """One entry of `trk`. `att` counts failed attempts per block index; `job` is the load's."""

    gen: int
    front: int
    retry: frozenset[int]
    att: Mapping[int, int]
    load: Load
    job: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The scheduler side's variables. `led` also holds `job`; `pins` counts our references per block."""

    next_job: int
    epoch: str
    led: Mapping[int, OpenJobView]
    trk: Mapping[str, TrackerView]
    pins: Mapping[int, int]
    known: frozenset[bytes]
    nohit: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One row of `rk`: lives of open jobs, jobs that are over (as far as they are remembered), reports not handed out."""

    lives: Mapping[int, Life]
    over: frozenset[int]
    ready: tuple[Report, ...]
