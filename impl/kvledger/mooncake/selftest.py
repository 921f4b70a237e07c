"""The start-up self-test: one small object is put, asked for, read, compared and removed, before any request is served.

A store whose master answers may still accept nothing, and a cache that never holds anything looks like a cold one. What
is found here is found once per engine, with a remedy; what happens later is told by `observe/faults.py`.
"""

import ctypes
import logging
import secrets
import threading
import time

from kvledger.errors import StoreError
from kvledger.keys import KeySpace
from kvledger.mooncake.client import StoreClient
from kvledger.mooncake.codes import Code, describe, is_no_space

logger = logging.getLogger(__name__)

TIMEOUT_S = 20.0
"""Longest time for all of it. A transfer that cannot reach its peer keeps a call for 5 to 10 s."""
RETRY_FOR_S = 2.0
RETRY_PAUSE_S = 0.25
OBJECT_BYTES = 4096
MARK = "selftest-"
"""Stands behind the prefix in the keys of these objects."""

_UNREACHABLE = (
    "the master answers, but no bytes reach the memory that it names: check that the address families agree (with IPv6 "
    "set MC_USE_IPV6=1 in every process that joins the store, and let local_hostname be an address of that family), that "
    "local_hostname of each memory owner can be reached from this host, and that no firewall closes Mooncake's ports"
)
_REMEDIES: dict[int, str] = {
    Code.SEGMENT_NOT_FOUND: "no process gives the store memory: start a memory owner, or set global_segment_size",
    Code.NO_AVAILABLE_HANDLE: "there is no space: no process gives the store memory (start a memory owner, or set "
    "global_segment_size), or it is full and evicts nothing (make it larger)",
    Code.TENANT_QUOTA_EXCEEDED: "the tenant's quota is used up: raise it, or use another tenant_id",
    Code.TENANT_NOT_REGISTERED: "register the tenant with the master, or correct tenant_id",
    Code.TRANSFER_FAIL: _UNREACHABLE,
    Code.RPC_FAIL: "the master does not answer: see its log, and whether master_server_address is right",
    Code.RPC_TIMEOUT: "the master does not answer in time: see its log and the network",
}


def self_test(client: StoreClient, keys: KeySpace, *, timeout_s: float = TIMEOUT_S) -> None:
    """Put, ask for, get, compare and remove an object of 4 KiB under `keys`' prefix. Leaves nothing behind.

    A store without space is asked again for two seconds, because it may be about to evict. Then it is warned of, no more:
    full is the normal state of a cache, and a full store costs hits only.

    Raises:
        StoreError: which of the steps failed, with its code and what to do; also if all has not ended in `timeout_s`.
    """
    attempt = _Attempt(client, f"{keys.prefix()}{MARK}{secrets.token_hex(8)}")
    thread = threading.Thread(target=attempt.run, name="kvledger-selftest", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise StoreError(f"self-test ({attempt.step})", None, f"no answer within {timeout_s:g} s; {_UNREACHABLE}")
    if attempt.error is not None:
        raise attempt.error


class _Attempt:
    """One run, in a thread of its own because a call may not come back; keeps its memory as long as that lasts."""

    def __init__(self, client: StoreClient, key: str) -> None:
        self._client = client
        self._key = key
        self._memory = (ctypes.c_char * (2 * OBJECT_BYTES))()
        ctypes.memmove(self._memory, secrets.token_bytes(OBJECT_BYTES), OBJECT_BYTES)
        self.step = "register"
        self.error: StoreError | None = None
        self.stored = True

    def run(self) -> None:
        """All steps; `error` says which failed."""
        base = ctypes.addressof(self._memory)
        try:
            self._client.register(base, 2 * OBJECT_BYTES)
            try:
                self._steps(base)
            finally:
                self._client.unregister(base)
        except StoreError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - the client may raise anything; `self_test` raises it
            self.error = self._failure(None, f"{type(error).__name__}: {error!s:.300}; {_UNREACHABLE}")
            self.error.__cause__ = error

    def _steps(self, base: int) -> None:
        try:
            self.step = "put"
            answer = self._put(base)
            if len(answer) == 1 and is_no_space(answer[0]):
                logger.warning(
                    "kvledger: self-test (put): %s; %s", describe(answer[0]), _REMEDIES.get(answer[0], "make it larger")
                )
                self.stored = False
                return
            self._expect(0, answer)
            self.step = "exist"
            self._expect(1, self._client.exists([self._key]))
            self.step = "get"
            self._expect(OBJECT_BYTES, self._client.get([self._key], [[base + OBJECT_BYTES]], [[OBJECT_BYTES]]))
            self.step = "compare"
            if self._memory.raw[:OBJECT_BYTES] != self._memory.raw[OBJECT_BYTES:]:
                raise self._failure(None, "the bytes read are not the bytes put; do not use this store")
        finally:
            removed = self._client.remove_by_prefix(self._key, force=True)
        self.step = "remove"
        self._expect(int(self.stored), [removed])

    def _put(self, base: int) -> list[int]:
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            answer = self._client.put([self._key], [[base]], [[OBJECT_BYTES]])
            if len(answer) != 1 or not is_no_space(answer[0]) or time.monotonic() >= deadline:
                return answer
            time.sleep(RETRY_PAUSE_S)

    def _expect(self, wanted: int, answer: list[int]) -> None:
        if answer == [wanted]:
            return
        if len(answer) != 1 or answer[0] >= 0:
            raise self._failure(None, f"answered {answer!r:.100} where [{wanted}] was due; use a supported Mooncake")
        remedy = _REMEDIES.get(answer[0], "see the logs of the master and of the memory owners")
        raise self._failure(answer[0], f"{describe(answer[0])}; {remedy}")

    def _failure(self, code: int | None, remedy: str) -> StoreError:
        return StoreError(f"self-test ({self.step})", code, remedy)
