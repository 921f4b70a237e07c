"""The client against a real Mooncake store on loopback: answers, start-up errors, and an end that cannot crash."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo.faults import Fault, FaultyStore, Gate
from kvledger.config import Settings, load_settings
from kvledger.errors import ConfigError, StoreError
from kvledger.mooncake import client as client_module
from kvledger.mooncake.client import (
    MooncakeClient,
    check_direct,
    check_master,
    check_protocol,
    import_store,
    installed_distribution,
    local_address_towards,
    prefix_pattern,
)
from kvledger.mooncake.codes import Code
from kvledger.mooncake.embedded import EmbeddedStore, list_keys, running_embedded

MIB = 1 << 20
BUFFER = 4 * MIB


class Memory:
    """Host memory with an address."""

    def __init__(self, size: int = BUFFER) -> None:
        self._bytes = (ctypes.c_char * size)()
        self.address = ctypes.addressof(self._bytes)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(memoryview(self._bytes)[part])

    def fill(self, offset: int, content: bytes) -> int:
        """Write there; answers the address."""
        ctypes.memmove(self.address + offset, content, len(content))
        return self.address + offset


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with running_embedded(tmp_path_factory.mktemp("store"), 64 * MIB) as running:
        yield running


@pytest.fixture(scope="module")
def settings(store: EmbeddedStore) -> Settings:
    return load_settings({}, {}).attached_to(store.master_address)


@pytest.fixture(scope="module")
def shared(settings: Settings) -> Iterator[MooncakeClient]:
    connected = connect(settings)
    yield connected
    connected.close(5)


@pytest.fixture(scope="module")
def memory(shared: MooncakeClient) -> Memory:
    made = Memory()
    shared.register(made.address, BUFFER)
    return made


def connect(
    settings: Settings, *, segment_bytes: int = 0, name: str = "test", timeout_s: float = 5.0
) -> MooncakeClient:
    return MooncakeClient.connect(
        settings, segment_bytes=segment_bytes, buffer_bytes=0, name=name, connect_timeout_s=timeout_s
    )


def test_a_round_trip_in_one_segment_and_in_several(shared: MooncakeClient, memory: Memory) -> None:
    one, two = memory.fill(0, b"a" * 100), memory.fill(1000, b"b" * 50)
    out = memory.address + MIB
    assert shared.put(["t1", "t2"], [[one], [two]], [[100], [50]]) == [0, 0]
    assert shared.put(["t3", "t4"], [[one, two], [two]], [[100, 50], [50]]) == [0, 0]
    assert shared.exists(["t1", "t2", "t3", "t4", "t5"]) == [1, 1, 1, 1, 0]
    assert shared.get(["t3", "t1"], [[out, out + 500], [out + 1000]], [[60, 90], [100]]) == [150, 100]
    assert memory[MIB : MIB + 60] == b"a" * 60
    assert memory[MIB + 500 : MIB + 590] == b"a" * 40 + b"b" * 50
    assert shared.get(["t3", "t1"], [[out + 2000], [out + 3000]], [[150], [100]]) == [150, 100]
    assert memory[MIB + 2000 : MIB + 2150] == b"a" * 100 + b"b" * 50


def test_a_put_never_replaces(shared: MooncakeClient, memory: Memory) -> None:
    first, second = memory.fill(0, b"1" * 64), memory.fill(64, b"2" * 64)
    assert shared.put(["once"], [[first]], [[64]]) == [0]
    assert shared.put(["once"], [[second]], [[64]]) == [0]
    assert shared.get(["once"], [[memory.address + MIB]], [[64]]) == [64]
    assert memory[MIB : MIB + 64] == b"1" * 64


def test_a_get_of_what_is_not_so(shared: MooncakeClient, memory: Memory) -> None:
    at = memory.fill(0, b"x" * 100)
    assert shared.put(["whole"], [[at]], [[100]]) == [0]
    answers = shared.get(["absent", "whole", "whole"], [[at], [at], [at]], [[100], [50], [200]])
    assert answers[0] == Code.OBJECT_NOT_FOUND
    assert answers[1] == Code.INVALID_PARAMS
    assert answers[2] != 200  # the bytes that were read, which the caller compares


def test_a_full_store_refuses_and_says_so(tmp_path: Path) -> None:
    """In a store of its own: above its watermark the master evicts whenever it likes, whoever's objects they are."""
    with running_embedded(tmp_path / "store", 32 * MIB) as own:
        client = connect(load_settings({}, {}).attached_to(own.master_address), segment_bytes=0)
        memory = Memory(2 * MIB)
        client.register(memory.address, 2 * MIB)
        keys = [f"full{i}" for i in range(40)]
        answers = client.put(keys, [[memory.address]] * 40, [[2 * MIB]] * 40)
        assert set(answers) == {0, int(Code.NO_AVAILABLE_HANDLE)}
        there = client.exists(keys)
        assert all(answer == 0 for answer, exists in zip(answers, there, strict=True) if exists)
        client.close(5.0)


def test_no_keys_is_no_call(shared: MooncakeClient) -> None:
    assert shared.exists([]) == shared.put([], [], []) == shared.get([], [], []) == []


def test_lists_that_do_not_match_are_the_callers_error(shared: MooncakeClient) -> None:
    with pytest.raises(ValueError, match="2 keys, 1 pointer lists"):
        shared.put(["a", "b"], [[1]], [[1]])
    with pytest.raises(ValueError, match="1 pointers and 2 sizes for key 'a'"):
        shared.get(["a"], [[1]], [[1, 2]])
    with pytest.raises(ValueError, match="0 pointers"):
        shared.put(["a"], [[]], [[]])


def test_registering_twice_is_an_error_at_once(shared: MooncakeClient) -> None:
    extra = Memory(MIB)
    shared.register(extra.address, MIB)
    with pytest.raises(StoreError, match="registered already") as caught:
        shared.register(extra.address, MIB)
    assert caught.value.code == Code.INVALID_PARAMS
    shared.unregister(extra.address)
    shared.unregister(extra.address)  # only logged


def test_removing_by_prefix_takes_exactly_the_prefix(
    shared: MooncakeClient, memory: Memory, store: EmbeddedStore
) -> None:
    prefix = "p-1/m.o+d(e)[l]{x}|^$*?\\:@ ~#&,=<>'\"%;`é!"
    keys = [prefix + "@k1", prefix, "other" + prefix, prefix.replace(".", "x") + "@k2", "p"]
    assert shared.put(keys, [[memory.address]] * 5, [[8]] * 5) == [0] * 5
    assert shared.remove_by_prefix(prefix) == 2
    assert set(list_keys(store.metrics_port)).isdisjoint(keys[:2])
    assert set(list_keys(store.metrics_port)).issuperset(keys[2:])
    with pytest.raises(StoreError, match="empty prefix"):
        shared.remove_by_prefix("")


def test_prefix_patterns() -> None:
    assert prefix_pattern("a_B9@x.y") == "^a_B9\\@x\\.y"


def test_a_preferred_segment_is_passed_on(settings: Settings, store: EmbeddedStore) -> None:
    preferring = load_settings(
        {"master_server_address": store.master_address, "local_hostname": "127.0.0.1", "preferred_segment": "here:1"},
        {},
    )
    connected = connect(preferring, segment_bytes=MIB * 16)
    try:
        assert connected._replicate.preferred_segment == "here:1"
    finally:
        connected.close(5)


def test_health(settings: Settings, shared: MooncakeClient) -> None:
    assert shared.health() == client_module.HEALTHY


# -- the end ---------------------------------------------------------------


def test_after_close_nothing_is_called(settings: Settings, memory: Memory) -> None:
    closed = connect(settings)
    closed.close(5)
    closed.close(5)
    assert_closed(closed, memory)


def test_an_unconnected_client_can_be_closed(memory: Memory) -> None:
    unconnected = MooncakeClient(name="half-built")
    assert_closed(unconnected, memory)
    unconnected.close(1)


def assert_closed(client: MooncakeClient, memory: Memory) -> None:
    gone = [int(Code.CLIENT_CLOSED)]
    assert client.exists(["a"]) == gone
    assert client.put(["a"], [[memory.address]], [[1]]) == gone
    assert client.get(["a"], [[memory.address]], [[1]]) == gone
    assert client.remove_by_prefix("a") == gone[0]
    assert client.health() == client_module.CLOSED
    client.unregister(memory.address)
    with pytest.raises(StoreError, match="closed"):
        client.register(memory.address, 1)


def test_close_waits_for_a_call_in_flight(settings: Settings, memory: Memory) -> None:
    client = connect(settings)
    native = Recorder(client)
    call = threading.Thread(target=lambda: native.answers.extend(client.exists(["a"])))
    call.start()
    assert native.entered.wait(10)
    close = threading.Thread(target=client.close, args=(20,))
    close.start()
    with client._changed:
        assert client._changed.wait_for(lambda: client._closing, timeout=10)
    assert client.exists(["b"]) == [int(Code.CLIENT_CLOSED)]
    native.go.set()
    call.join(10)
    close.join(20)
    assert native.answers == [0]
    assert native.log == ["begin", "end", "close"]


def test_close_leaves_a_handle_open_whose_call_does_not_return(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(settings)
    native = Recorder(client)
    call = threading.Thread(target=client.exists, args=(["a"],))
    call.start()
    assert native.entered.wait(10)
    client.close(0.05)
    assert "stays open" in caplog.text
    native.go.set()
    call.join(10)
    assert native.log == ["begin", "end"]  # not closed under the call, nor later
    native.inner.close()


class Recorder:
    """Stands between a client and its real native handle, and holds `batch_is_exist` until told to go on."""

    def __init__(self, client: MooncakeClient) -> None:
        self.inner = client._native
        self.log: list[str] = []
        self.answers: list[int] = []
        self.entered = threading.Event()
        self.go = threading.Event()
        client._native = self

    def batch_is_exist(self, keys: list[str]) -> Any:
        self.log.append("begin")
        self.entered.set()
        assert self.go.wait(30)
        self.log.append("end")
        return self.inner.batch_is_exist(keys)

    def close(self) -> Any:
        self.log.append("close")
        return self.inner.close()


@pytest.mark.parametrize("answer", [[], [0], [0, 0, 0], None, [0, "x"], [0, 1], [0, True], "ab", [0, 1.0]])
def test_an_answer_that_is_not_one_code_per_key_is_indeterminate(
    settings: Settings, memory: Memory, answer: object, shared: MooncakeClient
) -> None:
    real = shared._native
    shared._native = SimpleNamespace(batch_put_from=lambda *_: answer)
    try:
        assert shared.put(["a", "b"], [[1], [2]], [[1], [1]]) == [int(Code.TRANSFER_FAIL)] * 2
    finally:
        shared._native = real


def test_a_library_that_always_answers_malformed_is_told_once_and_counted(shared, caplog):
    real = shared._native
    shared._native = SimpleNamespace(batch_is_exist=lambda *_: None)
    before = shared._faults.counts().get("exists malformed answer", 0)
    try:
        for _ in range(20):
            assert shared.exists(["k"]) == [-800]
    finally:
        shared._native = real
    assert shared._faults.counts()["exists malformed answer"] - before == 20
    assert [m for m in caplog.messages if "exists malformed answer" in m] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_stopped_master_cannot_hold_up_close_or_the_end_of_the_process(tmp_path: Path) -> None:
    """With the master stopped, a real native call hangs; close returns in its time and the process can end."""
    with running_embedded(tmp_path, 16 * MIB) as store:
        script = """
import os, signal, sys, threading, time
from kvledger.config import load_settings
from kvledger.mooncake.client import MooncakeClient
settings = load_settings({}, {}).attached_to(sys.argv[1])
client = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name="t")
os.kill(int(sys.argv[2]), signal.SIGSTOP)
threading.Thread(target=client.exists, args=(["a"],), daemon=True).start()
while not client._in_flight: time.sleep(0.01)
begin = time.monotonic()
client.close(0.5)
took = time.monotonic() - begin
os.kill(int(sys.argv[2]), signal.SIGCONT)
print("in time" if took < 5 else took, client.exists(["b"]), flush=True)
"""
        ended = run_python(script, store.master_address, str(store.master_pid))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "in time [-10001]"


def test_a_client_that_gave_memory_closes_in_its_time_when_the_master_is_gone(tmp_path: Path) -> None:
    """Mooncake's own close would keep the whole process waiting for about 15 s."""
    with running_embedded(tmp_path, 16 * MIB) as store:
        script = """
import os, signal, sys, time
from kvledger.config import load_settings
from kvledger.mooncake.client import MooncakeClient
settings = load_settings({}, {}).attached_to(sys.argv[1])
client = MooncakeClient.connect(settings, segment_bytes=16 << 20, buffer_bytes=0, name="owner")
os.kill(int(sys.argv[2]), signal.SIGKILL)
begin = time.monotonic()
client.close(5)
took = time.monotonic() - begin
print("in time" if took < 5 else took, client.exists(["b"]), flush=True)
os._exit(0)  # Mooncake's exit handler would make up for the wait
"""
        ended = run_python(script, store.master_address, str(store.master_pid))
    assert ended.stdout == "in time [-10001]\n", ended.stderr


def run_python(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


# -- starting --------------------------------------------------------------


def external(address: str) -> Settings:
    return load_settings({"master_server_address": address, "local_hostname": "127.0.0.1"}, {})


def test_no_address() -> None:
    with pytest.raises(StoreError, match="ensure_embedded"):
        connect(load_settings({}, {}))


def test_an_address_where_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(StoreError, match=f"no Mooncake master at 127.0.0.1:{port}.*correct master_server_address"):
        connect(external(f"127.0.0.1:{port}"))


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(StoreError, match=r"no Mooncake master at nowhere\.invalid:1"):
        connect(external("nowhere.invalid:1"))


def test_an_address_where_something_else_listens(store: EmbeddedStore) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StoreError, match="answered as a Mooncake master"),
    ):
        connect(external(f"127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.3)
    with pytest.raises(StoreError, match="is the port its RPC port"):
        connect(external(f"127.0.0.1:{store.metrics_port}"), timeout_s=0.3)


def test_an_http_server_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreError, match="is an HTTP server"):
            connect(external(f"127.0.0.1:{server.getsockname()[1]}"))
        thread.join(10)


def test_a_setup_that_mooncake_refuses(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real refusal: SSD offload into a folder that does not exist."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/nonexistent/kvledger")
    offload = load_settings(
        {"master_server_address": store.master_address, "local_hostname": "127.0.0.1", "enable_offload": True}, {}
    )
    with pytest.raises(StoreError, match="MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"):
        connect(offload, segment_bytes=16 * MIB)


def test_the_local_address_is_found_out(store: EmbeddedStore) -> None:
    connected = connect(load_settings({"master_server_address": store.master_address}, {}))
    try:
        assert connected._native.get_hostname().startswith("127.0.0.1:")
    finally:
        connected.close(5)


def test_a_missing_system_library_names_the_package() -> None:
    def load(_: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    with pytest.raises(StoreError, match="install the Debian/Ubuntu package libibverbs1"):
        import_store(load)


def test_a_missing_mooncake_names_the_distribution() -> None:
    def load(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'mooncake'")

    with pytest.raises(StoreError, match="install mooncake-transfer-engine"):
        import_store(load)


@pytest.mark.parametrize(
    ("library", "wheel"),
    [("libcudart.so.12", "mooncake-transfer-engine-cuda13 >="), ("libcudart.so.13", ": mooncake-transfer-engine >=")],
)
def test_a_wheel_for_the_other_cuda_names_the_right_one(library: str, wheel: str) -> None:
    def load(_: str) -> Any:
        raise ImportError(f"{library}: cannot open shared object file: No such file or directory")

    with pytest.raises(StoreError, match=library) as caught:
        import_store(load)
    assert wheel in caught.value.remedy
    assert "mooncake-transfer-engine-non-cuda" in caught.value.remedy


def test_a_missing_driver_is_named() -> None:
    def load(_: str) -> Any:
        raise ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")

    with pytest.raises(StoreError, match="NVIDIA driver"):
        import_store(load)


def versions(**installed: str) -> Callable[[str], str]:
    """A stand-in for importlib.metadata.version where these distributions are installed."""

    def version(name: str) -> str:
        key = name.replace("-", "_")
        if key not in installed:
            raise PackageNotFoundError(name)
        return installed[key]

    return version


def test_every_wheel_of_mooncake_is_known_by_its_name() -> None:
    for suffix in ("", "-cuda13", "-non-cuda", "-efa", "-efa-cuda13", "-efa-non-cuda", "-rocm", "-musa", "-npu"):
        name = "mooncake-transfer-engine" + suffix
        found = installed_distribution(versions(**{name.replace("-", "_"): "0.3.14"}))
        assert found == (name, "0.3.14")
    assert installed_distribution(versions()) is None
    assert installed_distribution() is not None  # the real one


def test_the_extras_install_one_wheel_per_cuda() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wheels = {
        name: [line.partition(">=")[0].partition("==")[0] for line in lines if line.startswith("mooncake")]
        for name, lines in extras.items()
    }
    assert wheels["cuda12"] == ["mooncake-transfer-engine"]
    assert wheels["cuda13"] == ["mooncake-transfer-engine-cuda13"]
    assert wheels["cpu"] == ["mooncake-transfer-engine-non-cuda"]
    assert extras["cuda"] == ["kvledger[cuda13]"]  # what the images of vLLM 0.32 have
    assert "'.[cuda13]'" in Path("Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-efa-non-cuda"])
def test_direct_transfers_of_device_memory_need_a_wheel_that_can_address_it(name: str) -> None:
    with pytest.raises(ConfigError, match="transfer_mode = 'direct'") as caught:
        check_direct("cuda", (name, "0.3.14"))
    assert f"{name} 0.3.14 cannot address cuda memory; set transfer_mode to 'staged'" in caught.value.remedy
    assert "mooncake-transfer-engine-cuda13" in caught.value.remedy
    check_direct("cpu", (name, "0.3.14"))


def test_direct_transfers_with_a_wheel_that_can_or_may() -> None:
    check_direct("cuda", ("mooncake-transfer-engine-cuda13", "0.3.14"))
    check_direct("cuda", ("mooncake-transfer-engine-efa", "0.3.13"))
    check_direct("cuda", ("mooncake-transfer-engine", "0.3.13"))
    check_direct("cuda", None)


def test_a_protocol_with_wheels_of_its_own_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="protocol = 'efa'") as caught:
        check_protocol("efa", ("mooncake-transfer-engine-non-cuda", "0.3.13"))
    assert "install mooncake-transfer-engine-efa or mooncake-transfer-engine-efa-cuda13 or" in caught.value.remedy
    check_protocol("efa", ("mooncake-transfer-engine-efa-cuda13", "0.3.13"))
    check_protocol("ascend", ("mooncake-transfer-engine-npu", "0.3.13"))
    check_protocol("efa", ("mooncake-transfer-engine", "0.3.13"))  # may be built from source
    check_protocol("nvlink", ("mooncake-transfer-engine-non-cuda", "0.3.13"))  # Mooncake itself will say
    check_protocol("efa", None)


def test_the_installed_wheel_is_asked_for_the_protocol(store: EmbeddedStore) -> None:
    with pytest.raises(ConfigError, match=r"mooncake-transfer-engine-non-cuda .* is built without it"):
        connect(load_settings({"master_server_address": store.master_address, "protocol": "efa"}, {}))


@pytest.mark.parametrize("version", ["0.3.12", "0.3.9.post2", "0.2.99"])
def test_an_old_mooncake_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "installed_version", lambda: version)
    with pytest.raises(StoreError, match=rf"Mooncake {version} is too old.*>= 0\.3\.13"):
        import_store()


@pytest.mark.parametrize("version", ["0.3.13", "0.3.13.post1", "0.4.0", "1.0.0rc1", None, "weird"])
def test_a_new_mooncake_passes(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "installed_version", lambda: version)
    import_store()


def test_missing_methods_are_named() -> None:
    class Old:
        setup = close = None

    with pytest.raises(StoreError, match="lacks register_buffer"):
        import_store(lambda _: SimpleNamespace(MooncakeDistributedStore=Old))


# -- masters behind a locator ----------------------------------------------


class Handle:
    """What `setup` and `health_check` of a native handle answer; Mooncake needs 22 s to refuse a protocol."""

    def __init__(self, code: int, health: int) -> None:
        self.code, self.health, self.closed = code, health, 0

    def setup(self, **_: object) -> int:
        return self.code

    def health_check(self) -> int:
        return self.health

    def get_hostname(self) -> str:
        return "here:1"

    def close(self) -> int:
        self.closed += 1
        return 0


def set_up(handle: Handle, address: str, segment_bytes: int = 0, **extra: str) -> MooncakeClient:
    client = MooncakeClient(name="test")
    settings = load_settings({"master_server_address": address, "local_hostname": "h", **extra}, {})
    module = SimpleNamespace(MooncakeDistributedStore=lambda: handle, ReplicateConfig=SimpleNamespace)
    client._setup(module, settings, address, segment_bytes, 0)
    return client


def test_a_protocol_that_mooncake_refuses_is_named_with_the_build() -> None:
    with pytest.raises(StoreError, match=r"mooncake-transfer-engine\S* 0\.3\.\S+ may be built without barex"):
        set_up(Handle(-1, 0), "10.0.0.7:50051", protocol="barex")


@pytest.mark.parametrize("address", ["k8s://default/mooncake", "redis://127.0.0.1:1"])
def test_a_locator_that_the_installed_mooncake_does_not_have_is_named(address: str) -> None:
    """Mooncake 0.3.13 on PyPI is built with etcd alone; it says so after 2 s."""
    with pytest.raises(StoreError, match="may be built without") as caught:
        connect(external(address))
    assert f"{address} in master_server_address" in caught.value.remedy


def test_an_etcd_that_is_not_there_cannot_hold_up_the_start() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"etcd://127.0.0.1:{unused.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(StoreError, match=f"no etcd at {address}.*correct master_server_address"):
            connect(external(address))
    assert time.monotonic() - begin < 50  # Mooncake itself asks for 100 s


def test_one_etcd_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        check_master(f"etcd://127.0.0.1:{unused.getsockname()[1]};127.0.0.1:{there.getsockname()[1]}", 5)


def test_the_health_behind_a_locator_is_asked_after_set_up() -> None:
    handle = Handle(0, client_module.HEALTHY)
    client = set_up(handle, "etcd://a:1;b:1", segment_bytes=1)
    client.close(1)
    assert handle.closed == 1
    lost = Handle(0, client_module.UNREACHABLE)
    with pytest.raises(StoreError, match="no master is found through etcd://a:1"):
        set_up(lost, "etcd://a:1")
    assert lost.closed == 1


def test_a_client_whose_masters_are_gone_is_not_closed_natively(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle(0, client_module.HEALTHY)
    client = set_up(handle, "etcd://a:1", segment_bytes=1)
    handle.health = client_module.UNREACHABLE
    client.close(1)
    assert handle.closed == 0
    assert "does not answer" in caplog.text


def test_the_local_address_towards_a_locator() -> None:
    assert local_address_towards("etcd://127.0.0.1:2379;10.0.0.8:2379") == "127.0.0.1"


# -- faults ----------------------------------------------------------------


def test_faults_come_by_operation_and_call_number(shared: MooncakeClient, memory: Memory) -> None:
    broken = RuntimeError("scripted")
    faulty = FaultyStore(
        shared,
        faults=[
            Fault(operation="put", call=1, code=-200),
            Fault(operation="put", call=2, code=-800, transfer=True, positions=frozenset({1})),
            Fault(operation="exists", call=2, error=broken),
            Fault(operation="get", call=1, short=True),
        ],
    )
    two = (["f1", "f2"], [[memory.address]] * 2, [[16]] * 2)
    assert faulty.put(*two) == [-200, -200]
    assert faulty.exists(["f1", "f2"]) == [0, 0]  # nothing was sent
    assert faulty.put(*two) == [0, -800]
    with pytest.raises(RuntimeError, match="scripted"):
        faulty.exists(["f1"])
    assert faulty.exists(["f1", "f2"]) == [1, 1]  # the bytes moved, the answer was lost
    assert faulty.get(*two) == [16]
    assert faulty.get(*two) == [16, 16]
    assert faulty.calls("put") == 2


def test_a_gate_holds_a_call_before_its_transfer(shared: MooncakeClient, memory: Memory) -> None:
    gate = Gate()
    faulty = FaultyStore(shared)
    faulty.add(Fault(operation="put", call=1, gate=gate))
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.extend(faulty.put(["g"], [[memory.fill(0, b"old")]], [[3]])))
    thread.start()
    assert gate.reached.wait(10)
    assert shared.exists(["g"]) == [0]
    memory.fill(0, b"new")
    gate.open()
    thread.join(10)
    assert answers == [0]
    assert shared.get(["g"], [[memory.address + MIB]], [[3]]) == [3]
    assert memory[MIB : MIB + 3] == b"new"


def test_a_gate_that_nobody_opens_gives_up(shared: MooncakeClient) -> None:
    faulty = FaultyStore(shared, faults=[Fault(operation="exists", gate=Gate(timeout_s=0.01))])
    with pytest.raises(TimeoutError, match="stayed closed"):
        faulty.exists(["a"])


def test_a_delay_is_loud_and_ends_with_close(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyStore(connect(settings), delay_s=3600.0)
    assert "STORE FAULTS ARE ON" in caplog.text
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.extend(faulty.exists(["a"])))
    thread.start()
    faulty.close(5)
    thread.join(10)
    assert not thread.is_alive()
    assert answers in ([0], [int(Code.CLIENT_CLOSED)])
