"""Jobs and their reports: the only values that travel between the scheduler side and the ranks.

What may live here: immutable values and the table of a job's life on a rank. Model: the records `Job` and
`Report`; `RANK_LIFE` is the rank half of the actions `RankAccept` … `TakeReports`.
Invariant: a job is self-contained. A rank needs nothing but the job to run it, and keeps nothing by request.
"""

import enum
from dataclasses import dataclass

from kvledger.errors import ProtocolError


class Kind(enum.Enum):
    """What a job does with its blocks."""

    STORE = "store"
    LOAD = "load"


class Result(enum.IntEnum):
    """How a job ended on one rank, from good to bad; a job's result is the worst over its ranks."""

    DONE = 0
    REFUSED = 1  # the store had no space; nothing moved
    FAILED = 2  # final failure; nothing moves any more
    DROPPED = 3  # never started on this rank
    INDETERMINATE = 4  # the call gave up; bytes may have moved later


class Life(enum.Enum):
    """Where a job stands on one rank."""

    QUEUED = "queued"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    REPORTED = "reported"


# (life, action) -> life. A missing entry is a refusal.
RANK_LIFE: dict[tuple[Life, str], Life] = {
    (Life.QUEUED, "RankStart"): Life.RUNNING,
    (Life.QUEUED, "RankDrop"): Life.REPORTED,
    (Life.RUNNING, "RankFinish"): Life.REPORTED,
    (Life.RUNNING, "RankQuarantine"): Life.QUARANTINED,
    (Life.RUNNING, "RankExpire"): Life.REPORTED,
    (Life.QUARANTINED, "RankExpire"): Life.REPORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One transfer that every rank performs on its shard of the same blocks.

    `block_ids[i]` holds (store) or receives (load) the KV whose chained hash is `hashes[i]`. Both are copies: nothing
    that the scheduler side changes later is visible to a queued job.

    Raises:
        ProtocolError: no blocks, or lengths that differ.
    """

    job_id: int
    kind: Kind
    generation: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    group: int = 0
    epoch: str = ""
    """Key epoch at emission (changed by a cache reset)."""
    reply_to: str = ""
    """Asynchronous loads: the request id that vLLM wants to hear back (`get_finished`). Used for the answer only."""
    sync: bool = False
    """Loads: the forward of the same step reads the blocks."""

    def __post_init__(self) -> None:
        if not self.block_ids or len(self.block_ids) != len(self.hashes):
            raise ProtocolError(
                f"a job needs as many hashes as blocks, at least one: {len(self.block_ids)} blocks, "
                f"{len(self.hashes)} hashes",
                job_id=self.job_id,
                action="Emit",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank says about one job, exactly once.

    `bad` lists the positions in the job (0 … blocks - 1) that are not provably stored or loaded.
    """

    job_id: int
    rank: int
    result: Result
    bad: tuple[int, ...] = ()
