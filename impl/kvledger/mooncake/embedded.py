"""The embedded store: a Mooncake master and its memory on this host, without configuration.

A daemon, one per user and folder, runs `mooncake_master` on loopback and owns the memory, so that objects outlive the
engine that stored them. An engine holds a lease: an open connection to the daemon's Unix socket, which ends with the
process however it ends. When the last lease has been gone for the linger time the daemon ends master and itself.

What may live here: the engines' side of that arrangement; `daemon.py` is the other. Invariants: whoever starts or ends
a daemon (other than by signal or the master's death) holds the folder's lock; at most one daemon answers on the
socket; every wait has a bound.

Master and daemon serve on loopback, but Mooncake's TCP transport in every process that moves data (daemon and engines)
listens on all interfaces, whatever the host name, and gives any peer the memory registered with it. Mooncake 0.3.13 has
no option against that: on a host that others can reach, a firewall has to close these ports.

In the folder: `lock`, `lease.sock`, `daemon.log` (of the last start; kept), all open to this user only.
"""

import contextlib
import http.client
import json
import logging
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvledger.config import Settings, load_settings
from kvledger.errors import ConfigError, StoreError
from kvledger.mooncake.daemon import DaemonInfo, try_lock

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 90.0  # a start by somebody else fits in
LEASE_TIMEOUT_S = 5.0
END_TIMEOUT_S = 20.0
HTTP_TIMEOUT_S = 10.0
_MAX_SOCKET_PATH = 100  # the system's limit is 107 bytes
_LOG_TAIL_LINES = 20
_POLL_S = 0.02


# -- the engine's side -----------------------------------------------------


class EmbeddedStore:
    """A lease on the running embedded store. Ends with `release`, or with the process."""

    def __init__(self, info: DaemonInfo, connection: socket.socket, directory: Path) -> None:
        self.info = info
        self.directory = directory
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def master_address(self) -> str:
        """The master, host:port."""
        return self.info.master_address

    @property
    def metrics_port(self) -> int:
        """Port of the master's HTTP interface, on 127.0.0.1."""
        return self.info.metrics_port

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self.info.pid

    @property
    def master_pid(self) -> int:
        """The master's process id."""
        return self.info.master_pid

    @property
    def segment_bytes(self) -> int:
        """The store's memory."""
        return self.info.segment_bytes

    def alive(self) -> bool:
        """Whether the daemon still runs, as far as this lease knows. Does not wait."""
        return not self.wait_ended(0.0)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the daemon has ended (it has taken its master along by then). False when the time is up."""
        with self._lock:
            if self._connection.fileno() < 0:
                return True
            return _at_end(self._connection, timeout_s)

    def release(self) -> None:
        """Give the lease back. May be repeated."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # also ends copies of it in forked children
            self._connection.close()

    def stop(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the daemon and its master now, whoever else uses them, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, signal.SIGTERM)
        ended = self.wait_ended(timeout_s)
        self.release()
        if not ended:
            raise StoreError(
                "embedded store", None, f"its daemon (pid {self.pid}) did not end in {timeout_s:g} s; kill it"
            )


def ensure_embedded(settings: Settings) -> EmbeddedStore:
    """A lease on this user's embedded store on this host, which is started if it does not run.

    Raises StoreError or ConfigError, with the end of the daemon's log if it did not start.
    """
    directory = runtime_directory(settings)
    with _folder_lock(directory, LOCK_TIMEOUT_S):
        store = _join(directory)
        if store is None:
            _start_daemon(directory, settings)
            store = _join(directory)
    if store is None:
        raise _start_error(directory, "the daemon started and ended at once")
    _note_differences(store, settings)
    return store


@contextlib.contextmanager
def running_embedded(
    directory: str | os.PathLike[str], segment_bytes: int, *, linger_s: float = 0.0
) -> Iterator[EmbeddedStore]:
    """An embedded store of its own folder for the time of the `with` block, then ended."""
    settings = load_settings(
        {"embedded_dir": os.fspath(directory), "global_segment_size": segment_bytes, "embedded_linger_s": linger_s}, {}
    )
    store = ensure_embedded(settings)
    try:
        yield store
    finally:
        store.stop()


def list_keys(metrics_port: int, *, host: str = "127.0.0.1", timeout_s: float = HTTP_TIMEOUT_S) -> list[str]:
    """All keys of the default tenant, from the master's HTTP interface, sorted."""
    connection = http.client.HTTPConnection(host, metrics_port, timeout=timeout_s)
    try:
        connection.request("GET", "/get_all_keys")
        response = connection.getresponse()
        body = response.read().decode("utf-8")
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(
            "get_all_keys", None, f"no answer from the master at {host}:{metrics_port} ({error})"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise StoreError(
            "get_all_keys", None, f"the master at {host}:{metrics_port} answered {response.status}: {body:.200}"
        )
    return sorted(line for line in body.split("\n") if line)


def runtime_directory(settings: Settings) -> Path:
    """The folder of the embedded store, made if needed. Only this user may own it or write to it."""
    named = settings.embedded_dir
    directory = Path(named).expanduser().resolve() if named else _default_directory()

    def unusable(remedy: str) -> ConfigError:
        source = settings.sources.get("embedded_dir", "default")
        return ConfigError("embedded_dir", str(directory), remedy, source)

    if len(os.fsencode(directory / "lease.sock")) > _MAX_SOCKET_PATH:
        raise unusable(f"the path is too long for a Unix socket; use one of at most {_MAX_SOCKET_PATH - 11} bytes")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise unusable(f"the folder cannot be made ({error.strerror}); name another") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise unusable("this is not a folder of this user; name another")
    if status.st_mode & 0o022:
        raise unusable(f"others can write to this folder; run chmod go-w {directory}, or name another")
    return directory


def _default_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "kvledger"
    return Path(tempfile.gettempdir()) / f"kvledger-{os.getuid()}"


@contextlib.contextmanager
def _folder_lock(directory: Path, timeout_s: float) -> Iterator[None]:
    """The folder's lock; it falls with the process, so it is never left behind."""
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise StoreError(
                    "embedded store",
                    None,
                    f"another process has held {directory / 'lock'} for {timeout_s:g} s; "
                    "end it, or use another embedded_dir",
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _join(directory: Path) -> EmbeddedStore | None:
    """A lease from the daemon that runs, or None if none does. The caller holds the lock."""
    path = directory / "lease.sock"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(LEASE_TIMEOUT_S)
    try:
        connection.connect(os.fspath(path))
        info = _read_info(connection)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise StoreError(
            "embedded store",
            None,
            f"its daemon does not answer on {path} ({error}); end it, or use another embedded_dir",
        ) from error
    if info is None:  # it is about to end
        connection.close()
        return None
    connection.settimeout(None)
    return EmbeddedStore(info, connection, directory)


def _read_info(connection: socket.socket) -> DaemonInfo | None:
    """The line that the daemon sends first; None if it closed the connection instead."""
    received = b""
    while not received.endswith(b"\n"):
        try:
            part = connection.recv(4096)
        except ConnectionResetError:
            return None
        if not part or len(received) > 65536:
            return None
        received += part
    return DaemonInfo(**json.loads(received))


def _at_end(connection: socket.socket, timeout_s: float) -> bool:
    """Whether the peer has closed the connection, or does so within the time. A daemon sends nothing but its line."""
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        return True


def _note_differences(store: EmbeddedStore, settings: Settings) -> None:
    if store.segment_bytes < settings.global_segment_size:
        logger.warning(
            "kvledger: the embedded store (pid %d) runs with %d bytes, less than the %d asked for "
            "(global_segment_size); end it to start a larger one",
            store.pid,
            store.segment_bytes,
            settings.global_segment_size,
        )
    logger.info(
        "kvledger: embedded store at %s, %d bytes, daemon pid %d, folder %s",
        store.master_address,
        store.segment_bytes,
        store.pid,
        store.directory,
    )


# -- starting the daemon ---------------------------------------------------


def _start_daemon(directory: Path, settings: Settings) -> None:
    """Start a daemon and wait until it is ready. The caller holds the lock, so what lies there is stale."""
    with contextlib.suppress(FileNotFoundError):
        (directory / "lease.sock").unlink()
    read_end, write_end = os.pipe()
    try:
        with open(directory / "daemon.log", "wb") as log:
            launcher = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvledger.mooncake.daemon",
                    *_daemon_arguments(directory, settings, write_end),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_daemon_environment(),
                cwd="/",
                pass_fds=(write_end,),
                start_new_session=True,
            )
        os.close(write_end)
        write_end = -1
        _await_ready(directory, launcher, read_end)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def _daemon_arguments(directory: Path, settings: Settings, ready: int) -> list[str]:
    return [
        "--directory", str(directory),
        "--segment-bytes", str(settings.global_segment_size),
        "--linger-s", repr(settings.embedded_linger_s),
        "--ready-fd", str(ready),
    ]  # fmt: skip


def _daemon_environment() -> dict[str, str]:
    """The same environment, with this very package first on the path."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    absolute = [os.path.abspath(part) for part in inherited]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, *absolute])}


def _await_ready(directory: Path, launcher: "subprocess.Popen[bytes]", read_end: int) -> None:
    """Wait for the daemon's "ready", or for its end, or for the time to be up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(read_end, selectors.EVENT_READ)
        while not received.endswith(b"ready\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                _kill_session(launcher)
                raise _start_error(directory, f"the daemon was not ready in {START_TIMEOUT_S:g} s")
            part = os.read(read_end, 4096)
            if not part:
                break
            received += part
    launcher.wait(END_TIMEOUT_S)  # it has forked the daemon and ends at once
    if not received.endswith(b"ready\n"):
        raise _start_error(directory, received.decode("utf-8", "replace").strip() or "the daemon ended")


def _kill_session(launcher: "subprocess.Popen[bytes]") -> None:
    """The launcher leads the session in which daemon and master run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait(END_TIMEOUT_S)


def _start_error(directory: Path, reason: str) -> StoreError:
    path = directory / "daemon.log"
    try:
        lines = path.read_text("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        lines = []
    shown = "".join(f"\n  {line:.300}" for line in lines)
    return StoreError("embedded store", None, f"{reason}; the end of {path}:{shown or ' (empty)'}")
