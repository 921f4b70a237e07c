"""Stores in this process, in the place of the module `mooncake.store`: one that costs nothing, one that makes wait.

Both connectors find them by the import that they do anyway, and call them as they call Mooncake.
"""

import contextlib
import ctypes
import importlib
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kvledger_conformance.store.standin import ReplicateConfig

SELF_TEST_MARK = "selftest-"  # kvledger reads back what it puts under such a key before it serves
TRANSFER_FAILED = -800


class NullStore:
    """Answers every call at once and moves nothing, so that what is left to measure is the connector's own work."""

    holds = False
    """Whether every object is there, or none is."""
    _kept: bytes = b""

    def setup(self, *_args: Any, **_named: Any) -> int:
        """Joined."""
        return 0

    def close(self) -> int:
        """Left."""
        return 0

    def health_check(self) -> int:
        """Healthy."""
        return 0

    def get_hostname(self) -> str:
        """Where this client says it is."""
        return "127.0.0.1:0"

    def register_buffer(self, _address: int, _size: int) -> int:
        """Known."""
        return 0

    def unregister_buffer(self, _address: int) -> int:
        """Forgotten."""
        return 0

    def remove_by_regex(self, _pattern: str, _force: bool = False) -> int:
        """One object, the self-test's."""
        return 1

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """All of them, or none."""
        there = NullStore.holds or SELF_TEST_MARK in keys[0]
        return [int(there)] * len(keys)

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], _config: Any = None) -> list[int]:
        """Stored."""
        if SELF_TEST_MARK in keys[0]:
            self._kept = ctypes.string_at(addresses[0], sizes[0])
        return [0] * len(keys)

    def batch_put_from_multi_buffers(
        self, keys: list[str], _addresses: list[list[int]], _sizes: list[list[int]], _config: Any = None
    ) -> list[int]:
        """Stored."""
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Read."""
        if SELF_TEST_MARK in keys[0]:
            ctypes.memmove(addresses[0], self._kept, len(self._kept))
        return list(sizes)

    def batch_get_into_multi_buffers(
        self, keys: list[str], _addresses: list[list[int]], sizes: list[list[int]], _same_node: bool = False
    ) -> list[int]:
        """Read. All objects of an engine have one size."""
        return [sum(sizes[0])] * len(keys)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        """Nothing is known of places."""
        return {key: [] for key in keys}


class Delay:
    """How long each call that moves bytes takes longer; all of them can be let go at once."""

    def __init__(self, seconds: float, *, lookups: bool = False, fails: bool = False) -> None:
        self.seconds = seconds
        self.lookups = lookups
        self.fails = fails
        self.over = threading.Event()

    def wait(self) -> bool:
        """Wait; whether the call goes on to the store then."""
        if self.seconds:
            self.over.wait(self.seconds)
        return not self.fails


def delayed(real: Any, delay: Delay) -> type:
    """Mooncake's client class with a delay before its calls; a failing one answers "transfer failed" instead."""

    class Delayed:
        def __init__(self) -> None:
            self._real = real()

        def __getattr__(self, name: str) -> Any:
            call = getattr(self._real, name)
            moves = name.startswith(("batch_put", "batch_get_into"))
            return _waiting(call, delay) if moves or (delay.lookups and name == "batch_is_exist") else call

    return Delayed


def _waiting(call: Callable[..., Any], delay: Delay) -> Callable[..., Any]:
    def waiting(keys: list[str], *arguments: Any) -> Any:
        if SELF_TEST_MARK in keys[0] or delay.wait():
            return call(keys, *arguments)
        return [TRANSFER_FAILED] * len(keys)

    return waiting


@contextlib.contextmanager
def installed(store_class: type, replicate_config: type = ReplicateConfig) -> Iterator[None]:
    """Clients made inside the block are of this class."""
    module = types.ModuleType("mooncake.store")
    module.__spec__ = importlib.machinery.ModuleSpec("mooncake.store", None)
    vars(module).update(MooncakeDistributedStore=store_class, ReplicateConfig=replicate_config)
    parent = importlib.import_module("mooncake")
    before = sys.modules.get("mooncake.store")
    sys.modules["mooncake.store"] = module
    try:
        with mock.patch.object(parent, "store", module, create=True):
            yield
    finally:
        if before is None:
            del sys.modules["mooncake.store"]
        else:
            sys.modules["mooncake.store"] = before
