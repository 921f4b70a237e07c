"""A stand-in for Mooncake's Python client, at the level of its native API, that does what it is told.

It takes the place of the module `mooncake.store` in one process. It really copies bytes from and to the addresses it is
given, so a connector under test moves real KV bytes. What a real store does at bad moments happens here on demand, as
the `World` behind it says: a call is held before, in the middle of or after its copy; it refuses, fails, raises, answers
short or odd; it times out (-800) while its copy goes on until `World.land` lets it end; objects are evicted.

The answers, odd ones included, are those of Mooncake 0.3.13; a differential test compares the two call by call.
"""

import contextlib
import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from kvledger_conformance.store.transfer import Transfer, read_segments, write_segments
from kvledger_conformance.store.world import StoredObject, World

NO_SPACE, BAD_PARAMS, NOT_FOUND, HAS_LEASE, TRANSFER_FAIL = -200, -600, -704, -706, -800

Segments = list[tuple[int, int]]
"""(address, size) of the buffers of a key."""
Move = Callable[[Transfer, str, Segments], int]


class CallAfterCloseError(RuntimeError):
    """A call on a closed handle: the real client ends the process with a segmentation fault."""


_world = World()


def current() -> World:
    """The world that new handles join."""
    return _world


class ReplicateConfig:
    """Mooncake's placement wishes; accepted and ignored."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.with_soft_pin = False
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.group_ids: list[str] = []


class MooncakeDistributedStore:
    """One client handle. Method names, arguments and answers are Mooncake's."""

    def __init__(self) -> None:
        self._world = current()
        self._client = self._world.building
        self._buffers: dict[int, int] = {}
        self._closed = False

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Join the store. Arguments as Mooncake's, by position, by name, or one dictionary."""
        del args, kwargs
        return 0

    def get_hostname(self) -> str:
        """Where this client says it is."""
        return "127.0.0.1:0"

    def health_check(self) -> int:
        """0 healthy, 1 closed."""
        return int(self._closed)

    def close(self) -> int:
        """End of use."""
        self._closed = True
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory known; twice is an error."""
        self._check("register_buffer")
        if buffer_ptr in self._buffers:
            return BAD_PARAMS
        self._buffers[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo `register_buffer`."""
        self._check("unregister_buffer")
        return 0 if self._buffers.pop(buffer_ptr, None) is not None else BAD_PARAMS

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1 or 0 per key; grants a lease on what is there."""
        self._check("batch_is_exist")
        if not keys:
            return []
        transfer = self._world.begin(self._client, "exists", keys, [])

        def probe() -> list[int]:
            with self._world.changed:
                found = [self._world.objects.get(k) for k in keys]
                for stored in found:
                    if stored is not None:
                        stored.leased = True
                short = transfer.fault is not None and transfer.fault.kind == "short"
                return [int(stored is not None) for stored in (found[:-1] if short else found)]

        return self._run(transfer, probe)

    def is_exist(self, key: str) -> int:
        """`batch_is_exist` of one key."""
        return self.batch_is_exist([key])[0]

    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Store one buffer per key; an object that exists stays as it is and answers 0."""
        return self.batch_put_from_multi_buffers(keys, [[p] for p in buffer_ptrs], [[s] for s in sizes], config)

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store the concatenation of several buffers per key."""
        del config
        return self._transfer("put", keys, all_buffer_ptrs, all_sizes, self._put)

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Read one object per buffer; answers the bytes read, also when the buffer is larger."""
        pointers, lengths = [[p] for p in buffer_ptrs], [[s] for s in sizes]
        return self._transfer("get", keys, pointers, lengths, lambda *one: self._read(*one, exact=False))

    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read one object into several buffers whose sizes must add up to the object's."""
        del prefer_alloc_in_same_node
        return self._transfer("get", keys, all_buffer_ptrs, all_sizes, lambda *one: self._read(*one, exact=True))

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        """Where objects lie; this store says nothing about that."""
        return {k: [] for k in keys}

    def remove(self, key: str, force: bool = False) -> int:
        """Remove one object; -706 while a reader holds it."""
        self._check("remove")
        with self._world.changed:
            stored = self._world.objects.get(key)
            if stored is not None and stored.leased and not force:
                return HAS_LEASE
            return 0 if self._world.evict([key]) else NOT_FOUND

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove what matches and nobody reads; the number removed."""
        self._check("remove_by_regex")
        with self._world.changed:
            stored = self._world.objects.items()
            return self._world.evict([k for k, o in stored if re.search(regex_pattern, k) and (force or not o.leased)])

    def remove_all(self, force: bool = False) -> int:
        """Remove everything that nobody reads; the number removed."""
        self._check("remove_all")
        return self.remove_by_regex("", force)

    # -- transfers ---------------------------------------------------------

    def _check(self, operation: str) -> None:
        if self._closed:
            self._world.closed_calls.append(f"{self._client}: {operation}")
            raise CallAfterCloseError(f"{operation} on a closed Mooncake handle")

    def _run(self, transfer: Transfer, call: Callable[[], list[int]]) -> list[int]:
        """Gates and faults around one call."""
        world, fault = self._world, transfer.fault
        try:
            world.wait_at(transfer, "before")
            if fault is not None and fault.kind == "raise":
                raise RuntimeError(f"scripted: {transfer.operation} raised before its transfer")
            if fault is not None and fault.kind == "late":
                return self._give_up(transfer)
            answer = [fault.code] * len(transfer.keys) if fault is not None and fault.refuses_all else call()
            world.wait_at(transfer, "after")
            return answer if fault is None else fault.change(answer)
        finally:
            transfer.in_call = False
            with world.changed:
                world.changed.notify_all()

    def _give_up(self, transfer: Transfer) -> list[int]:
        """-800: the client stops waiting, the bytes go on moving."""
        with self._world.changed:
            plan: list[tuple[Segments, bytes]] = []
            if transfer.operation == "get":
                objects = self._world.objects
                plan = [
                    (segments, objects[key].data)
                    for key, segments in zip(transfer.keys, transfer.segments, strict=True)
                    if key in objects
                ]
            transfer.start_late(plan)
        return [TRANSFER_FAIL] * len(transfer.keys)

    def _transfer(
        self, operation: str, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], move: Move
    ) -> list[int]:
        self._check(f"batch_{operation}")
        segments = _shape(keys, pointers, sizes)
        if segments is None:
            return [BAD_PARAMS] * len(keys)
        if not keys:
            return []
        transfer = self._world.begin(self._client, operation, keys, segments)
        return self._run(transfer, lambda: self._each(transfer, move))

    def _each(self, transfer: Transfer, move: Move) -> list[int]:
        """The code of each key: what its fault says, or what comes of moving its bytes."""
        world, fault, answer = self._world, transfer.fault, []
        for i, (key, segments) in enumerate(zip(transfer.keys, transfer.segments, strict=True)):
            if i == len(transfer.keys) // 2:
                world.wait_at(transfer, "during")
            if fault is not None and fault.omits(i, len(transfer.keys)):
                continue
            if fault is not None and fault.spares(i):
                answer.append(fault.code)
                continue
            with world.changed:
                answer.append(move(transfer, key, segments))
        if transfer.operation == "put":
            world.on_read(transfer)
        return answer

    def _put(self, transfer: Transfer, key: str, segments: Segments) -> int:
        world, data = self._world, read_segments(segments)
        if key in world.objects:
            return 0
        if not data or (world.capacity is not None and world.used() + len(data) > world.capacity):
            return NO_SPACE if data else BAD_PARAMS
        world.objects[key] = StoredObject(data)
        world.on_commit(transfer, key, data)
        return 0

    def _read(self, _transfer: Transfer, key: str, segments: Segments, *, exact: bool) -> int:
        stored = self._world.objects.get(key)
        if stored is None:
            return NOT_FOUND
        stored.leased = True
        room, size = sum(size for _, size in segments), len(stored.data)
        if room < size:
            return BAD_PARAMS
        if exact and room > size:
            return TRANSFER_FAIL
        write_segments(segments, stored.data)
        return size


def _shape(
    keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[Segments] | None:
    """(address, size) per buffer per key, or None if the lists do not fit."""
    if len(keys) != len(pointers) or len(keys) != len(sizes):
        return None
    if any(not p or len(p) != len(s) for p, s in zip(pointers, sizes, strict=True)):
        return None
    return [list(zip(p, s, strict=True)) for p, s in zip(pointers, sizes, strict=True)]


@contextlib.contextmanager
def installed(world: World) -> Iterator[World]:
    """`mooncake.store` is the stand-in, on `world`, inside the block; handles made in it keep this world.

    Whether Mooncake is installed does not matter, nor how the connector imports it.
    """
    global _world  # noqa: PLW0603 - the native module has one namespace per process, and so has its stand-in
    names = {"MooncakeDistributedStore": MooncakeDistributedStore, "ReplicateConfig": ReplicateConfig}
    module = _module("mooncake.store", **names)
    before, sys.modules["mooncake.store"] = sys.modules.get("mooncake.store"), module
    previous, _world = _world, world
    try:
        with mock.patch.object(_parent(), "store", module, create=True):
            yield world
    finally:
        _world = previous
        if before is None:
            sys.modules.pop("mooncake.store", None)
        else:
            sys.modules["mooncake.store"] = before


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # `find_spec` wants one of whatever is imported
    vars(module).update(names)
    return module


def _parent() -> types.ModuleType:
    """The package `mooncake`: the installed one if it imports here, else an empty one, which stays."""
    try:
        return importlib.import_module("mooncake")
    except Exception:  # noqa: BLE001 - also a Mooncake for other hardware, whose libraries are missing
        sys.modules["mooncake"] = parent = _module("mooncake", __path__=[])
        return parent
