"""Connectors under test: kvledger, vLLM's in-tree Mooncake store connector, or any class by name."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvledger_conformance.engine import compat
from kvledger_conformance.engine.build import build_engine
from kvledger_conformance.engine.engine import Engine, VirtualClock
from kvledger_conformance.store import master, standin
from kvledger_conformance.store.world import World
from kvledger_conformance.suite.properties import Impossible

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Target:
    """A connector class and how to configure it against a store.

    `extra(address)` gives its `kv_connector_extra_config`; `around` is entered for the life of one engine; `close` ends
    what the class's own shutdown leaves behind, so that thousands of engines fit in one process.
    """

    name: str
    module: str
    class_name: str
    extra: Callable[[str], dict[str, Any]] = lambda _address: {}
    around: Callable[[Callable[[], float], str], Any] = lambda _clock, _address: contextlib.nullcontext()
    close: Callable[[Engine], None] = lambda _engine: None
    refine: Callable[[Engine], None] | None = None
    """Further checks of this target's own state, after every action."""
    options: dict[str, Any] = field(default_factory=dict)
    holds: tuple[str, ...] = ("put", "get")
    """Operations that may be held for long; a connector that waits for one inside a hook would wait with it."""

    def version(self) -> str:
        """What the report calls this target."""
        return f"{self.name} on vLLM {compat.VLLM_VERSION}"

    def with_options(self, **options: Any) -> "Target":
        """The same target with further settings of its own."""
        return dataclasses.replace(self, options={**self.options, **options})


@contextlib.contextmanager
def running(
    target: Target, shape: compat.Shape, store: World | str, *, kind: type[Engine] = Engine
) -> Iterator[Engine]:
    """An engine around the target's connector, closed at the end whatever happened. `kind` is the class to build.

    `store`: a world, for the stand-in to serve, or the address of a real Mooncake master. On a real store, time and
    transfers are real: nothing can be held or scripted, and what needs to see each transfer is not checked.
    """
    clock, real = VirtualClock(), isinstance(store, str)
    with contextlib.ExitStack() as stack:
        world, address = stack.enter_context(_serving(store))
        # here: its module may say `from mooncake.store import ...`
        connector_class = getattr(importlib.import_module(target.module), target.class_name)
        stack.enter_context(target.around(time.monotonic if real else clock, address))
        extra = {**target.extra(address), **target.options}
        config = functools.partial(compat.make_config, shape, target.class_name, target.module, extra)
        try:
            engine = build_engine(kind, shape, world, clock, connector_class, config)
        except Exception as error:
            if shape.depth == 1:
                raise
            raise Impossible(f"the connector refuses two steps in flight: {error}") from error
        engine.refine = target.refine
        if real:
            engine.rest = lambda: None  # steps go on while transfers run
        try:
            yield engine
        finally:
            world.shut()
            for rank in engine.ranks:
                rank.stream.shut()
            for rank in engine.ranks:  # in vLLM's order: ranks first, then the scheduler side
                rank.connector.shutdown()
            engine.connector.shutdown()
            target.close(engine)


@contextlib.contextmanager
def _serving(store: World | str) -> Iterator[tuple[World, str]]:
    """The engine's world, which is the stand-in's or nobody's, and the address of the store's master."""
    if isinstance(store, str):
        yield World(), store
        return
    with standin.installed(store), contextlib.closing(master.MasterPort()) as port:
        yield store, port.address


# -- kvledger --------------------------------------------------------------


def _kvledger_extra(address: str) -> dict[str, Any]:
    return {
        "master_server_address": address,
        "mode": "standalone-store",
        "staging_bytes": "64KiB",
        "max_batch_bytes": "4KiB",
        "shutdown_timeout_s": 5.0,
        "lookup_wait_s": 10.0,
        "lookup_timeout_s": 20.0,
        "retry_backoff_s": 2.0,
        "breaker_open_s": 2.0,
        "stall_timeout_s": 8.0,
        "quarantine_s": 20.0,
    }


@contextlib.contextmanager
def _kvledger_clock(clock: Callable[[], float], _address: str) -> Iterator[None]:
    """Every bound of kvledger is measured by the harness's clock."""
    from kvledger_conformance.suite import kvledger

    kvledger.drive(clock)
    yield


KVLEDGER = Target(
    name="kvledger",
    module="kvledger_conformance.suite.kvledger",
    class_name="DrivenConnector",
    extra=_kvledger_extra,
    around=_kvledger_clock,
)

# -- vLLM's in-tree connector ----------------------------------------------


@contextlib.contextmanager
def _in_tree_environment(_clock: Callable[[], float], address: str, *, offload: bool = False) -> Iterator[None]:
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": "16MB",
        "local_buffer_size": "16MB",
        "enable_offload": offload,
    }
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "mooncake.json")
        path.write_text(json.dumps(settings))
        changed = {"MOONCAKE_CONFIG_PATH": str(path), "VLLM_RPC_BASE_PATH": folder}
        if offload:  # the budget of the SSD tier's staging buffer, so small that every key is a batch of its own
            changed["VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"] = "0.00001"
        with mock.patch.dict(os.environ, changed):
            yield


class _EndThread:
    """A queue item whose handling ends the transfer thread: it has no end of its own."""

    def __getattr__(self, _name: str) -> Any:
        raise SystemExit


def _in_tree_close(engine: Engine) -> None:
    """End the threads and sockets that the connector's shutdown leaves behind."""
    for rank in engine.ranks:
        worker = rank.connector.connector_worker
        for thread in (worker.kv_send_thread, *worker.kv_recv_threads):
            if thread is not None:
                thread.request_queue.put(_EndThread())
                thread.join(5)
    client = engine.connector.connector_scheduler.client
    server = engine.ranks[0].connector.connector_worker.lookup_server
    if not server.thread.is_alive():
        _stuck.append((client, server))  # its client waits for ever; ending the sockets would wait with it
        return
    server.running = False
    client.executor.submit(_last_words, client).result(10)
    server.thread.join(5)
    server.close()
    server.ctx.term()
    client.executor.shutdown(wait=False, cancel_futures=True)
    client.socket.close(linger=0)
    client.ctx.term()


_stuck: list[Any] = []


def _last_words(client: Any) -> None:
    client.socket.send(b"?")
    client.socket.recv()


VLLM = Target(
    name="vllm",
    module="vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector",
    class_name="MooncakeStoreConnector",
    extra=lambda _address: {"lookup_rpc_port": next(_numbers)},
    around=_in_tree_environment,
    close=_in_tree_close,
)

BUILT_IN = {
    t.name: t
    for t in (
        KVLEDGER,
        dataclasses.replace(KVLEDGER, name="kvledger-direct", options={"transfer_mode": "direct"}),
        dataclasses.replace(KVLEDGER, name="kvledger-sync", options={"load_async": False}, holds=("put",)),
        dataclasses.replace(KVLEDGER, name="kvledger-decode", options={"save_decode_cache": True}),
        VLLM,
        # with the SSD tier on: loads are split into sub-batches
        dataclasses.replace(VLLM, name="vllm-offload", around=functools.partial(_in_tree_environment, offload=True)),
    )
}


def replace(target: Target, extra: Callable[[str], dict[str, Any]]) -> Target:
    """The target with further settings that may name the master's address."""
    return dataclasses.replace(target, extra=lambda address: {**target.extra(address), **extra(address)})


def find(name: str) -> Target:
    """The target called `name`: a built-in one, or MODULE:CLASS.

    Raises:
        ValueError: neither.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, class_name = name.partition(":")
    if not colon or not module or not class_name:
        raise ValueError(f"target {name!r} is not one of {sorted(BUILT_IN)} and not MODULE:CLASS")
    return Target(name=name, module=module, class_name=class_name)
