"""The store behind the stand-in's handles: its objects, and what shall happen to calls (gates, faults, late copies)."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvledger_conformance.store.transfer import HOLD_TIMEOUT_S, PHASES, Fault, Transfer


@dataclass
class StoredObject:
    """Bytes under a key, and whether a reader holds a lease on it."""

    data: bytes
    leased: bool = False


@dataclass
class World:
    """The whole store: objects, handles, gates, faults, and a record of every transfer.

    One lock guards all of it; a held call waits on its condition, always with a bound.
    """

    capacity: int | None = None
    objects: dict[str, StoredObject] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    gates: set[tuple[str, str, str]] = field(default_factory=set)
    """(client, operation, phase) of each closed gate."""
    faults: list[Fault] = field(default_factory=list)
    """Those still to come."""
    closed_calls: list[str] = field(default_factory=list)
    building: str = "client"
    on_commit: Callable[[Transfer, str, bytes], None] = lambda _transfer, _key, _data: None
    on_begin: Callable[[Transfer], None] = lambda _transfer: None
    on_read: Callable[[Transfer], None] = lambda _transfer: None

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._paused = False
        self._next = 1
        self._serials: dict[tuple[str, str], int] = {}
        self._over = False

    # -- control -----------------------------------------------------------

    def hold(self, client: str, operation: str, phase: str) -> None:
        """Close a gate: later calls of `operation` by `client` wait at `phase` ("before", "during" or "after")."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not one of {PHASES}")
        with self.changed:
            self.gates.add((client, operation, phase))

    def release(self, client: str | None = None, operation: str | None = None) -> None:
        """Open gates: of one client, one operation, or all."""
        with self.changed:
            self.gates = {g for g in self.gates if client not in (None, g[0]) or operation not in (None, g[1])}
            self.changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Hold every transfer call at its door, or let go: nothing moves while a step's hooks run."""
        with self.changed:
            self._paused = paused
            self.changed.notify_all()

    def add_fault(self, fault: Fault) -> None:
        """Script what happens to calls to come."""
        with self.changed:
            self.faults.append(fault)

    def clear_faults(self) -> None:
        """No more faults."""
        with self.changed:
            self.faults.clear()

    def evict(self, keys: Sequence[str]) -> int:
        """Drop objects, as a store under pressure does."""
        with self.changed:
            return sum(self.objects.pop(k, None) is not None for k in keys)

    def late(self) -> list[Transfer]:
        """Transfers whose call has given up and whose bytes still move."""
        return [t for t in self.transfers if t.late]

    def land(self) -> int:
        """Let every late copy end now. A late get writes its bytes; a late put is discarded by the store."""
        with self.changed:
            late = self.late()
            for transfer in late:
                transfer.finish_late()
            return len(late)

    def moving(self) -> list[Transfer]:
        """Transfers that may touch memory: calls that are out, and late ones."""
        return [t for t in self.transfers if t.in_call or t.late]

    def held(self) -> list[Transfer]:
        """Calls that wait at a closed gate."""
        return [t for t in self.transfers if t.at is not None]

    def shut(self) -> None:
        """The end of a run: all gates open, nothing is held any more."""
        with self.changed:
            self._over = True
            self._paused = False
            self.gates.clear()
            self.changed.notify_all()

    # -- one call ----------------------------------------------------------

    def begin(self, client: str, operation: str, keys: list[str], segments: list[list[tuple[int, int]]]) -> Transfer:
        """Record a call that has just entered."""
        with self.changed:
            transfer = Transfer(self._next, client, operation, list(keys), segments)
            self._next += 1
            transfer.serial = self._serials[client, operation] = self._serials.get((client, operation), 0) + 1
            self.transfers.append(transfer)
            transfer.fault = self._take_fault(client, operation)
        self.on_begin(transfer)
        return transfer

    def _take_fault(self, client: str, operation: str) -> Fault | None:
        for fault in self.faults:
            if fault.client in (None, client) and fault.operation == operation:
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                return fault
        return None

    def wait_at(self, transfer: Transfer, phase: str) -> None:
        """Wait while the gate of this call and phase is closed. Raises TimeoutError rather than wait for ever."""
        gate = (transfer.client, transfer.operation, phase)

        def free() -> bool:
            return self._over or (gate not in self.gates and not (phase == "before" and self._paused))

        with self.changed:
            if free():
                return
            transfer.at = phase
            self.changed.notify_all()
            try:
                if not self.changed.wait_for(free, timeout=HOLD_TIMEOUT_S):
                    raise TimeoutError(f"{transfer} was held for {HOLD_TIMEOUT_S:g} s")
            finally:
                transfer.at = None
                self.changed.notify_all()

    def used(self) -> int:
        """Bytes stored."""
        return sum(len(o.data) for o in self.objects.values())
