"""A store client with faults put in on purpose: delays for the demo, scripted failures for recordings and tests.

A wrapper around a real client, never a store of its own. Deterministic (faults are found by operation and call number,
nothing is random); without a matching fault a call reaches the wrapped client unchanged; every wait ends by itself, and
at `close`.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

from demo.plan import DELAY_MS
from kvledger.assembly import Parts
from kvledger.config import Settings
from kvledger.connector import MooncakeLedgerConnector
from kvledger.mooncake.client import MooncakeClient, StoreClient
from kvledger.mooncake.codes import Code
from kvledger.mooncake.selftest import MARK

logger = logging.getLogger(__name__)

Operation = Literal["exists", "put", "get"]
GATE_TIMEOUT_S = 120.0


class Gate:
    """Holds calls until it is opened. A test waits for `reached`, looks around, then opens."""

    def __init__(self, *, timeout_s: float = GATE_TIMEOUT_S) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._timeout_s = timeout_s

    def open(self) -> None:
        """Let held and later calls through."""
        self._open.set()

    def pass_through(self) -> None:
        """Wait until the gate is open. Raises TimeoutError rather than wait for ever."""
        self.reached.set()
        if not self._open.wait(self._timeout_s):
            raise TimeoutError(f"a fault gate stayed closed for {self._timeout_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to call number `call` (the first is 1; None: to every call) of `operation`.

    In this order: the call waits at `gate`; `error` is raised instead of the call; or `code` is answered, for
    `positions` or for all, the real call being made only if `transfer` says so (bytes moved, answer lost); or `short`
    drops the last entry of the real answer; or `nothing` is the answer (None). The start-up self-test is spared.
    """

    operation: Operation
    call: int | None = None
    gate: Gate | None = None
    error: Exception | None = None
    code: int | None = None
    positions: frozenset[int] | None = None
    transfer: bool = False
    short: bool = False
    nothing: bool = False


class FaultyStore(StoreClient):
    """A client that delays and fails as told, then does what the wrapped client does."""

    def __init__(self, inner: StoreClient, *, delay_s: float = 0.0, faults: Iterable[Fault] = ()) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._faults = list(faults)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        if delay_s > 0 or self._faults:
            logger.warning(
                "kvledger: STORE FAULTS ARE ON: every store operation waits %.0f ms first, %d scripted faults",
                delay_s * 1000,
                len(self._faults),
            )

    def add(self, fault: Fault) -> None:
        """Script one more fault; call numbers count from the making of this object."""
        with self._lock:
            self._faults.append(fault)

    def calls(self, operation: Operation) -> int:
        """How many calls of `operation` have begun."""
        with self._lock:
            return self._calls[operation]

    def exists(self, keys: list[str]) -> list[int]:
        """See StoreClient."""
        return self._run("exists", lambda: self._inner.exists(keys), keys)

    def put(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """See StoreClient."""
        return self._run("put", lambda: self._inner.put(keys, ptrs, sizes), keys)

    def get(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """See StoreClient."""
        return self._run("get", lambda: self._inner.get(keys, ptrs, sizes), keys)

    def register(self, ptr: int, size: int) -> None:
        self._inner.register(ptr, size)

    def unregister(self, ptr: int) -> None:
        self._inner.unregister(ptr)

    def remove_by_prefix(self, prefix: str, *, force: bool = False) -> int:
        """See StoreClient."""
        return self._inner.remove_by_prefix(prefix, force=force)

    def health(self) -> int:
        return self._inner.health()

    def close(self, timeout_s: float) -> None:
        """Ends delays, and opens every gate."""
        self._closing.set()
        for fault in self._faults:
            if fault.gate is not None:
                fault.gate.open()
        self._inner.close(timeout_s)

    def _run(self, operation: Operation, call: Callable[[], list[int]], keys: list[str]) -> list[int]:
        if keys and MARK in keys[0]:
            return call()
        faults = self._due(operation)
        if self._delay_s > 0:
            self._closing.wait(self._delay_s)
        for fault in faults:
            if fault.gate is not None:
                fault.gate.pass_through()
        for fault in faults:
            if fault.error is not None:
                raise fault.error
        return _answer(faults, call, len(keys))

    def _due(self, operation: Operation) -> list[Fault]:
        with self._lock:
            self._calls[operation] += 1
            number = self._calls[operation]
            return [f for f in self._faults if f.operation == operation and f.call in (None, number)]


def _answer(faults: list[Fault], call: Callable[[], list[int]], keys: int) -> list[int]:
    """The answer of the call as the faults change it; the call is left out if no entry of it would count."""
    coded = [f for f in faults if f.code is not None]
    replaced = any(f.positions is None and not f.transfer for f in coded)
    answer = [int(Code.INTERNAL_ERROR)] * keys if replaced else call()
    if any(f.nothing for f in faults):
        return cast("list[int]", None)
    for fault in coded:
        answer = [
            fault.code if fault.code is not None and (fault.positions is None or i in fault.positions) else entry
            for i, entry in enumerate(answer)
        ]
    return answer[:-1] if any(f.short for f in faults) else answer


def slow(client: StoreClient, name: str, faults: Iterable[Fault] = ()) -> StoreClient:
    """The client of a rank behind its delay and faults; the lookup's client as it is."""
    delay_s = float(os.environ.get(DELAY_MS, "0")) / 1000
    return FaultyStore(client, delay_s=delay_s, faults=faults) if name.startswith("rank") else client


def connect_slow_store(settings: Settings, *, segment_bytes: int, buffer_bytes: int, name: str) -> StoreClient:
    """`Parts.connect_store`: ranks wait before each store operation, as long as the environment says."""
    client = MooncakeClient.connect(settings, segment_bytes=segment_bytes, buffer_bytes=buffer_bytes, name=name)
    return slow(client, name)


class SlowConnector(MooncakeLedgerConnector):
    """kvledger on a slow store (`./dev demo --store-delay`)."""

    parts = Parts(connect_store=connect_slow_store)
