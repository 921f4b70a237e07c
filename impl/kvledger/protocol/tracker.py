"""One generation of one request: what has been issued, what is to be issued again, how its load stands.

What may live here: the tracker value and the table of its load's life. Model: the variable `trk`; operators
`BeginGeneration`, `EmitLoad`, `AfterEmit`, `LoadFinished`. Invariants: a tracker is never reset, only replaced; every
index below `frontier` was issued, known stored, or is in `retry`; nothing is storable while a load is pending.
"""

import enum
from dataclasses import dataclass, field

from kvledger.errors import ProtocolError


class Load(enum.Enum):
    """How the generation's load stands."""

    NONE = "none"
    PENDING = "pending"
    LOADED = "loaded"
    FAILED = "failed"
    TAINTED = "tainted"  # rests on bytes of a failed synchronous load, or older than a reset: stores nothing more


# (load, action) -> load. A missing entry is a refusal.
LOAD_LIFE: dict[tuple[Load, str], Load] = {
    (Load.NONE, "EmitLoad"): Load.PENDING,
    (Load.FAILED, "EmitLoad"): Load.PENDING,
    (Load.PENDING, "Loaded"): Load.LOADED,
    (Load.PENDING, "LoadFailed"): Load.FAILED,
    (Load.PENDING, "Taint"): Load.TAINTED,
    (Load.NONE, "Taint"): Load.TAINTED,
    (Load.LOADED, "Taint"): Load.TAINTED,
    (Load.FAILED, "Taint"): Load.TAINTED,
    (Load.TAINTED, "Taint"): Load.TAINTED,
    (Load.TAINTED, "Loaded"): Load.TAINTED,
    (Load.TAINTED, "LoadFailed"): Load.TAINTED,
}


@dataclass(slots=True)
class Tracker:
    """Progress of one generation. `frontier` counts blocks; `retry` maps a block index to the time it is due (s)."""

    generation: int
    frontier: int = 0
    retry: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    load: Load = Load.NONE
    load_job: int | None = None
    waits_for: set[int] = field(default_factory=set)
    """Synchronous load jobs of *other* generations that this one computes on (shared prefix, same step)."""

    def move_load(self, action: str) -> None:
        """`LoadFinished` and its sisters: advance the load's life by the table.

        Raises:
            ProtocolError: the table has no such step.
        """
        new = LOAD_LIFE.get((self.load, action))
        if new is None:
            raise ProtocolError(f"the load of generation {self.generation} is {self.load.value}", action=action)
        self.load = new

    @property
    def may_store(self) -> bool:
        """`Storable`, its first half: whether bytes of this generation are known to be right."""
        return self.load not in (Load.PENDING, Load.TAINTED) and not self.waits_for

    def due(self, now: float) -> list[int]:
        """Block indices whose retry time has come, lowest first."""
        return sorted(i for i, t in self.retry.items() if t <= now)
