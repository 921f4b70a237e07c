"""The start-up self-test: a store that keeps what it is given passes, any other is named with step, code and remedy."""

import ctypes
import threading
from typing import Any, cast

import pytest

from kvledger.errors import StoreError
from kvledger.keys import KeySpace
from kvledger.mooncake import selftest
from kvledger.mooncake.client import StoreClient
from kvledger.mooncake.selftest import self_test

KEYS = KeySpace(namespace="ns", cache_prefix="mine")


class Store:
    """A store client in memory. `answers` says what a call answers instead, once per entry."""

    def __init__(self, **answers: Any) -> None:
        self.objects: dict[str, bytes] = {}
        self.keys: list[str] = []
        self.registered: dict[int, int] = {}
        self.answers = answers
        self.gate = threading.Event()
        self.gate.set()

    def _scripted(self, step: str):
        self.gate.wait(30)
        answer = self.answers.get(step)
        if isinstance(answer, Exception):
            raise answer
        return answer.pop(0) if answer else None

    def register(self, ptr, size):
        self.registered[ptr] = size

    def unregister(self, ptr):
        del self.registered[ptr]

    def put(self, keys, ptrs, sizes):
        self.keys += keys
        if (answer := self._scripted("put")) is not None:
            return answer
        self.objects[keys[0]] = ctypes.string_at(ptrs[0][0], sizes[0][0])
        return [0]

    def exists(self, keys):
        return self._scripted("exist") or [int(keys[0] in self.objects)]

    def get(self, keys, ptrs, sizes):
        if (answer := self._scripted("get")) is not None:
            return answer
        ctypes.memmove(ptrs[0][0], self.objects[keys[0]], sizes[0][0])
        return [sizes[0][0]]

    def remove_by_prefix(self, prefix, *, force=False):
        gone = [k for k in self.objects if k.startswith(prefix) and force]
        for key in gone:
            del self.objects[key]
        return self._scripted("remove") or len(gone)


def test_a_store_that_works_passes_and_nothing_is_left_behind():
    store = Store()
    self_test(cast(StoreClient, store), KEYS)
    assert store.keys[0].startswith(KEYS.prefix())
    assert (store.objects, store.registered) == ({}, {})


@pytest.mark.parametrize(
    ("answers", "step", "code", "says"),
    [
        ({"put": [[-101]]}, "put", -101, "no process gives the store memory"),
        ({"put": [[-800]]}, "put", -800, "MC_USE_IPV6"),
        ({"put": [[-900]]}, "put", -900, "master_server_address"),
        ({"put": [[-54_321]]}, "put", -54_321, "logs of the master"),
        ({"put": RuntimeError("broke")}, "put", None, "RuntimeError: broke"),
        ({"exist": [[-900]]}, "exist", -900, "master"),
        ({"put": [[0]]}, "exist", None, r"answered \[0\] where \[1\]"),
        ({"get": [[-800]]}, "get", -800, "address families"),
        ({"get": [[17]]}, "get", None, r"answered \[17\]"),
        ({"get": [[]]}, "get", None, r"answered \[\]"),
        ({"get": [[selftest.OBJECT_BYTES]]}, "compare", None, "do not use this store"),
        ({"remove": [-706]}, "remove", -706, "a reader holds"),
    ],
)
def test_a_store_that_does_not_is_named_with_step_code_and_remedy(monkeypatch, answers, step, code, says):
    monkeypatch.setattr(selftest, "RETRY_FOR_S", 0.05)
    monkeypatch.setattr(selftest, "RETRY_PAUSE_S", 0.01)
    store = Store(**answers)
    with pytest.raises(StoreError, match=says) as caught:
        self_test(cast(StoreClient, store), KEYS)
    assert (caught.value.operation, caught.value.code) == (f"self-test ({step})", code)
    assert (store.objects, store.registered) == ({}, {})


def test_a_store_that_stays_full_is_warned_of_and_no_more(monkeypatch, caplog):
    monkeypatch.setattr(selftest, "RETRY_FOR_S", 0.05)
    monkeypatch.setattr(selftest, "RETRY_PAUSE_S", 0.01)
    store = Store(put=[[-200]] * 100)
    self_test(cast(StoreClient, store), KEYS)
    assert "full and evicts nothing" in caplog.text
    assert (store.objects, store.registered) == ({}, {})


def test_a_store_that_has_space_after_it_has_evicted_passes(monkeypatch):
    monkeypatch.setattr(selftest, "RETRY_PAUSE_S", 0.0)
    self_test(cast(StoreClient, Store(put=[[-200], [-200]])), KEYS)


def test_a_call_that_does_not_end_is_an_error_in_time():
    store = Store()
    store.gate.clear()
    with pytest.raises(StoreError, match=r"self-test \(put\).*no answer within 0\.05 s.*MC_USE_IPV6"):
        self_test(cast(StoreClient, store), KEYS, timeout_s=0.05)
    store.gate.set()
