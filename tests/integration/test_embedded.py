"""The embedded store: one per folder, found by later engines, outlives them, ends by itself and cleanly."""

import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvledger.config import Settings, load_settings
from kvledger.errors import ConfigError, StoreError
from kvledger.mooncake import embedded
from kvledger.mooncake.client import MooncakeClient, check_master
from kvledger.mooncake.embedded import EmbeddedStore, ensure_embedded, list_keys, running_embedded, runtime_directory

MIB = 1 << 20


def settings_for(folder: Path, *, linger_s: float = 0.0, segment_bytes: int = 16 * MIB) -> Settings:
    return load_settings(
        {"embedded_dir": str(folder), "embedded_linger_s": linger_s, "global_segment_size": segment_bytes}, {}
    )


@contextmanager
def ensured(settings: Settings) -> Iterator[EmbeddedStore]:
    """As an engine has it, but ended in any case."""
    store = ensure_embedded(settings)
    try:
        yield store
    finally:
        if store._connection.fileno() >= 0:
            store.stop()


class Exits:
    """Waits for the end of processes that are nobody's children here."""

    def __init__(self, *pids: int) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended within the time."""
        deadline = time.monotonic() + timeout_s
        ended = all(select.select([one], [], [], max(0.0, deadline - time.monotonic()))[0] for one in self._descriptors)
        for one in self._descriptors:
            os.close(one)
        return ended


def transfer(store: EmbeddedStore, operation: str, key: str, memory: "ctypes.Array[ctypes.c_char]") -> list[int]:
    """One `put` or `get` by a client of its own."""
    settings = settings_for(store.directory).attached_to(store.master_address)
    client = MooncakeClient.connect(settings, segment_bytes=0, buffer_bytes=0, name="test")
    client.register(ctypes.addressof(memory), len(memory))
    codes: list[int] = getattr(client, operation)([key], [[ctypes.addressof(memory)]], [[len(memory)]])
    client.close(5)
    return codes


class EngineProcess(subprocess.Popen[str]):
    """Another process that takes a lease, until it is killed or its input ends."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", LEASE, str(folder)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def daemon(self) -> int:
        """The daemon's process id, once the lease is taken."""
        assert self.stdout is not None
        return int(self.stdout.readline())


LEASE = f"""
import sys
from kvledger.config import load_settings
from kvledger.mooncake.embedded import ensure_embedded
values = {{"embedded_dir": sys.argv[1], "embedded_linger_s": 0.0, "global_segment_size": {16 * MIB}}}
store = ensure_embedded(load_settings(values, {{}}))
print(store.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fake_mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the daemon's Python a Mooncake that is this code."""

    def make(code: str) -> None:
        folder = tmp_path / "path" / "mooncake"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))

    return make


def test_objects_outlive_the_engine_that_stored_them_and_later_engines_find_the_store(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path, linger_s=60)) as first:
        assert transfer(first, "put", "k", ctypes.create_string_buffer(b"kept", 4)) == [0]
        assert list_keys(first.metrics_port) == ["k"]
        first.release()
        first.release()
        assert not first.alive()  # as far as this lease knows
        with ensured(settings_for(tmp_path)) as second:
            assert second.info == first.info
            memory = ctypes.create_string_buffer(4)
            assert transfer(second, "get", "k", memory) == [4]
            assert memory.raw == b"kept"


def test_the_store_ends_after_the_last_lease_and_leaves_nothing_but_its_log(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path)) as first, ensured(settings_for(tmp_path)) as second:
        assert first.pid == second.pid
        exits = Exits(first.pid, first.master_pid)
        first.release()
        assert second.alive()
        check_master(second.master_address, 5)
        second.release()
        assert exits.wait(20)
    assert sorted(os.listdir(tmp_path)) == ["daemon.log", "lock"]
    log = (tmp_path / "daemon.log").read_text()
    assert "no engine has used the store for 0 s" in log
    assert "Traceback" not in log


def test_a_crash_of_the_engine_gives_its_lease_back(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as crashed:
        exits = Exits(crashed.daemon())
        crashed.kill()
    assert exits.wait(20)


def test_engines_that_start_together_share_one_store(tmp_path: Path) -> None:
    with ExitStack() as running:
        engines = [running.enter_context(EngineProcess(tmp_path)) for _ in range(4)]
        (pid,) = {one.daemon() for one in engines}
        exits = Exits(pid)
    assert exits.wait(20)


def test_the_store_survives_the_engine_that_started_it(tmp_path: Path) -> None:
    """It is no child of the engine: another session, no zombie, and signals to the engine's group do not reach it."""
    with EngineProcess(tmp_path) as starter:
        pid = starter.daemon()
        with ensured(settings_for(tmp_path)) as store:
            assert store.pid == pid
            assert os.getsid(pid) not in (os.getsid(0), os.getsid(starter.pid))
            starter.kill()
            starter.wait(20)
            assert store.alive()
            check_master(store.master_address, 5)


def test_another_folder_is_another_store(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path / "a")) as one, ensured(settings_for(tmp_path / "b")) as other:
        assert one.pid != other.pid
        assert transfer(one, "put", "k", ctypes.create_string_buffer(1)) == [0]
        assert list_keys(one.metrics_port) == ["k"]
        assert list_keys(other.metrics_port) == []


def test_sigterm_ends_it_at_once_and_the_next_engine_starts_a_new_one(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path, linger_s=60)) as old:
        exits = Exits(old.pid, old.master_pid)
        os.kill(old.pid, signal.SIGTERM)
        with ensured(settings_for(tmp_path)) as new:
            assert new.pid != old.pid
            assert exits.wait(20)
            assert old.wait_ended(5)
            assert new.alive()  # the old one has not taken the new one's socket along
            with ensured(settings_for(tmp_path)) as again:
                assert again.pid == new.pid


def test_when_the_master_dies_the_store_ends_and_says_so(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path, linger_s=60)) as old:
        os.kill(old.master_pid, signal.SIGKILL)
        assert old.wait_ended(20)
        assert "mooncake_master ended by itself (status -9)" in (tmp_path / "daemon.log").read_text()
        with ensured(settings_for(tmp_path)) as new:
            assert new.pid != old.pid
            assert list_keys(new.metrics_port) == []


def test_when_the_daemon_is_killed_its_master_goes_too_and_the_next_engine_starts_a_new_one(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path, linger_s=60)) as old:
        exits = Exits(old.master_pid)
        os.kill(old.pid, signal.SIGKILL)
        assert exits.wait(20)
        assert old.wait_ended(5)
        assert (tmp_path / "lease.sock").exists()  # stale
        with ensured(settings_for(tmp_path)) as new:
            assert new.pid != old.pid


def test_a_smaller_store_than_asked_for_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        ensured(settings_for(tmp_path, segment_bytes=16 * MIB)) as store,
        ensured(settings_for(tmp_path, segment_bytes=32 * MIB)) as same,
    ):
        assert same.pid == store.pid
        assert same.segment_bytes == 16 * MIB
    assert "less than the 33554432 asked for" in caplog.text


def test_rubbish_on_the_socket_costs_only_that_connection(tmp_path: Path) -> None:
    with ensured(settings_for(tmp_path)) as store:
        with socket.socket(socket.AF_UNIX) as rude:
            rude.settimeout(10)
            rude.connect(str(tmp_path / "lease.sock"))
            rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
            said = rude.recv(4096)
            assert json.loads(said)["pid"] == store.pid
            assert rude.recv(4096) == b""
        assert store.alive()


def test_a_start_that_fails_tells_why_with_the_end_of_the_log(tmp_path, fake_mooncake, monkeypatch) -> None:
    fake_mooncake("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with pytest.raises(StoreError, match=r"(?s)libibverbs1.*the end of .*daemon\.log:.*did not start"):
        ensure_embedded(settings_for(tmp_path / "store"))
    monkeypatch.undo()
    with ensured(settings_for(tmp_path / "store")) as store:  # nothing is left in the way
        assert store.alive()


def test_a_start_that_hangs_is_ended(tmp_path, fake_mooncake, monkeypatch) -> None:
    fake_mooncake("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 2.0)
    with pytest.raises(StoreError, match="not ready in 2 s") as caught:
        ensure_embedded(settings_for(tmp_path / "store"))
    pid = int((tmp_path / "store" / "daemon.log").read_text().split()[0])
    assert str(pid) in str(caught.value)
    with suppress(ProcessLookupError):
        assert Exits(pid).wait(10)


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOCK_TIMEOUT_S", 0.1)
    with embedded._folder_lock(tmp_path, 1), pytest.raises(StoreError, match=r"has held .*lock for 0\.1 s"):
        ensure_embedded(settings_for(tmp_path))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for folder, told in (
        (tmp_path / "file", "not a folder|cannot be made"),
        (tmp_path / ("x" * 120), "too long"),
        (shared, "chmod go-w"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            runtime_directory(settings_for(folder))
        assert caught.value.field == "embedded_dir"
        assert str(folder) in str(caught.value)


def test_the_default_folder_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory(load_settings({}, {})) == tmp_path / "kvledger"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    made = runtime_directory(load_settings({}, {}))
    assert made == tmp_path / f"kvledger-{os.getuid()}"
    assert made.stat().st_mode & 0o777 == 0o700


def test_the_helper_ends_what_it_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_embedded(tmp_path, 16 * MIB) as store:
        exits = Exits(store.pid, store.master_pid)
        assert str(store.pid) in caplog.text
    assert exits.wait(5)
    with pytest.raises(StoreError, match="no answer from the master"):
        list_keys(store.metrics_port)
