"""The stand-in answers as real Mooncake does: one script of calls, odd ones included, on both."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvledger.mooncake.embedded import running_embedded
from kvledger_conformance.store import standin
from kvledger_conformance.store.transfer import Fault
from kvledger_conformance.store.world import World

SIZE = 4096
Call = Callable[[Any, Any, int, int], Any]

# (name, call): s the handle, r the placement, p the source, q the target buffer. Eviction under pressure is Mooncake's
# own choice and differs from run to run, so no script fills the store up.
SCRIPT: list[tuple[str, Call]] = [
    ("register", lambda s, r, p, q: (s.register_buffer(p, SIZE), s.register_buffer(q, SIZE))),
    ("register twice", lambda s, r, p, q: s.register_buffer(p, SIZE)),
    ("unregister what is not", lambda s, r, p, q: s.unregister_buffer(12345)),
    ("health", lambda s, r, p, q: s.health_check()),
    ("put", lambda s, r, p, q: s.batch_put_from(["a", "b"], [p, p + 64], [64, 64], r)),
    ("put again, other bytes, other size", lambda s, r, p, q: s.batch_put_from(["a", "a"], [p + 128] * 2, [64, 32], r)),
    ("put one key twice", lambda s, r, p, q: s.batch_put_from(["c", "c"], [p + 128] * 2, [64, 64], r)),
    ("put in parts", lambda s, r, p, q: s.batch_put_from_multi_buffers(["m"], [[p, p + 100]], [[10, 20]], r)),
    ("exist", lambda s, r, p, q: s.batch_is_exist(["a", "nowhere", "m", "c"])),
    ("exist of nothing", lambda s, r, p, q: s.batch_is_exist([])),
    ("exist of one", lambda s, r, p, q: (s.is_exist("a"), s.is_exist("nowhere"))),
    ("get", lambda s, r, p, q: s.batch_get_into(["a", "nowhere", "c"], [q, q + 64, q + 128], [64] * 3)),
    ("get into too small a buffer", lambda s, r, p, q: s.batch_get_into(["a"], [q + 256], [32])),
    ("get into a larger buffer", lambda s, r, p, q: s.batch_get_into(["a"], [q + 512], [100])),
    (
        "get in parts",
        lambda s, r, p, q: s.batch_get_into_multi_buffers(
            ["m", "a"], [[q + 1000, q + 1100], [q + 1200]], [[20, 10], [64]]
        ),
    ),
    (
        "get in parts, too small",
        lambda s, r, p, q: s.batch_get_into_multi_buffers(["m"], [[q + 1300, q + 1400]], [[10, 10]]),
    ),
    (
        "get in parts, too large",
        lambda s, r, p, q: s.batch_get_into_multi_buffers(["m"], [[q + 1500, q + 1600]], [[20, 20]]),
    ),
    (
        "nothing to put",
        lambda s, r, p, q: (s.batch_put_from([], [], [], r), s.batch_put_from_multi_buffers([], [], [], r)),
    ),
    ("nothing to get", lambda s, r, p, q: (s.batch_get_into([], [], []), s.batch_get_into_multi_buffers([], [], []))),
    ("lists that do not fit", lambda s, r, p, q: s.batch_put_from(["x"], [p, p], [64, 64], r)),
    ("lists that do not fit, get", lambda s, r, p, q: s.batch_get_into(["a"], [q], [])),
    ("parts that do not fit", lambda s, r, p, q: s.batch_put_from_multi_buffers(["x"], [[p, p]], [[1]], r)),
    ("an object of no bytes", lambda s, r, p, q: s.batch_put_from(["e"], [p], [0], r)),
    ("memory that is not registered", lambda s, r, p, q: s.batch_put_from(["u"], [p + SIZE], [64], r)),
    ("remove by prefix, what is read stays", lambda s, r, p, q: s.remove_by_regex("^[ab]$")),
    ("remove by prefix, nothing matches", lambda s, r, p, q: s.remove_by_regex("^zz")),
    ("remove by prefix, by force", lambda s, r, p, q: s.remove_by_regex("^m$", True)),
    ("remove while it is read", lambda s, r, p, q: s.remove("a")),
    ("remove what is not there", lambda s, r, p, q: s.remove("nowhere")),
    ("remove by force", lambda s, r, p, q: s.remove("a", True)),
    ("after it", lambda s, r, p, q: s.batch_is_exist(["a", "b", "c", "m", "u"])),
    ("remove all by force", lambda s, r, p, q: s.remove_all(True)),
    ("after that", lambda s, r, p, q: s.batch_is_exist(["a", "b", "c", "m", "u"])),
    ("put after all that", lambda s, r, p, q: s.batch_put_from(["a"], [p], [64], r)),
    ("unregister", lambda s, r, p, q: (s.unregister_buffer(p), s.unregister_buffer(q))),
    ("close", lambda s, r, p, q: s.close()),
]


def perform(store: Any, replicate: Any) -> list[tuple[str, Any, bytes]]:
    """Answers of the script, and the target buffer after each call."""
    source = (torch.arange(2 * SIZE, dtype=torch.int64) % 251).to(torch.uint8)
    target = torch.zeros(SIZE, dtype=torch.uint8)
    out = []
    for name, call in SCRIPT:
        try:
            answer = call(store, replicate, source.data_ptr(), target.data_ptr())
        except Exception as error:  # noqa: BLE001 - whatever it is, both must raise it
            answer = type(error).__name__
        out.append((name, answer, target.numpy().tobytes()))
    return out


def test_stand_in_answers_and_copies_as_mooncake_does(tmp_path):
    import mooncake.store as native

    with running_embedded(tmp_path / "store", 16 << 20) as running:
        store = native.MooncakeDistributedStore()
        setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", running.master_address)
        assert store.setup(*setup) == 0
        real = perform(store, native.ReplicateConfig())
    with standin.installed(World()):
        fake_store = standin.MooncakeDistributedStore()
        assert fake_store.setup(*setup) == 0
        fake = perform(fake_store, standin.ReplicateConfig())
    assert [(n, a) for n, a, _ in fake] == [(n, a) for n, a, _ in real]
    assert [n for (n, _, f), (_, _, r) in zip(fake, real, strict=True) if f != r] == []


def test_every_method_that_connectors_call_exists_in_the_real_client():
    import mooncake.store as native

    ours = [m for m in vars(standin.MooncakeDistributedStore) if re.match("[a-z]", m)]
    assert [m for m in ours if not hasattr(native.MooncakeDistributedStore, m)] == []
    theirs = native.ReplicateConfig()
    assert [m for m in vars(standin.ReplicateConfig()) if not hasattr(theirs, m) and m != "with_soft_pin"] == []


@pytest.fixture
def world() -> Iterator[World]:
    with standin.installed(World(building="rank0")) as made:
        yield made


SOURCE = torch.arange(16, dtype=torch.uint8)


@pytest.fixture
def store(world) -> standin.MooncakeDistributedStore:
    return standin.MooncakeDistributedStore()


def put(store: Any) -> Any:
    """Two objects of eight bytes."""
    return store.batch_put_from(["a", "b"], [SOURCE.data_ptr(), SOURCE.data_ptr() + 8], [8, 8], None)


@pytest.mark.parametrize(
    ("kind", "answer"), [("short", [0]), ("long", [0, 0, 0]), ("none", None), ("late", [-800, -800])]
)
def test_odd_answers(world, store, kind, answer):
    world.add_fault(Fault(operation="put", kind=kind))
    assert put(store) == answer
    assert put(store) == [0, 0]


@pytest.mark.parametrize(("kind", "stored"), [("raise", 0), ("raise_after", 2)])
def test_exceptions_before_and_after_the_copy(world, store, kind, stored):
    world.add_fault(Fault(operation="put", kind=kind))
    with pytest.raises(RuntimeError, match="scripted"):
        put(store)
    assert len(world.objects) == stored


def test_refusal_at_one_position_moves_the_others(world, store):
    world.add_fault(Fault(operation="put", kind="code", code=-200, positions=(0,)))
    assert put(store) == [-200, 0]
    assert list(world.objects) == ["b"]


def test_late_get_writes_when_it_lands(world, store):
    put(store)
    world.add_fault(Fault(operation="get", kind="late"))
    target = torch.zeros(8, dtype=torch.uint8)
    assert store.batch_get_into(["b"], [target.data_ptr()], [8]) == [-800]
    assert target.sum() == 0
    assert world.land() == 1
    assert target.tolist() == list(range(8, 16))


def test_capacity_and_eviction(world, store):
    world.capacity = 8
    assert put(store) == [0, -200]
    assert world.evict(["a", "nowhere"]) == 1
    assert store.batch_is_exist(["a"]) == [0]


def test_call_after_close_is_noted(world, store):
    store.close()
    with pytest.raises(standin.CallAfterCloseError):
        store.batch_is_exist(["a"])
    assert world.closed_calls == ["rank0: batch_is_exist"]


@pytest.mark.parametrize(("phase", "seen"), [("before", 0), ("during", 1), ("after", 2)])
def test_call_can_be_held_before_during_and_after_its_copy(world, store, phase, seen):
    world.hold("rank0", "put", phase)
    with ThreadPoolExecutor() as thread:
        answer = thread.submit(put, store)
        with world.changed:
            assert world.changed.wait_for(lambda: bool(world.held()), timeout=10)
        assert len(world.objects) == seen
        assert not answer.done()
        world.release()
        assert answer.result(10) == [0, 0]
    assert len(world.objects) == 2
