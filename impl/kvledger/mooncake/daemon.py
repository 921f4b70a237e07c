"""The embedded store's daemon: runs `mooncake_master` on loopback, owns the memory, serves leases, ends when nobody is left.

What may live here: the daemon process, started by `embedded.py` (`python -m kvledger.mooncake.daemon`). Invariants: it ends for
want of leases only under the folder's lock; it takes its master along however it ends; every wait has a bound.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from kvledger.config import load_settings
from kvledger.errors import KvledgerError, StoreError
from kvledger.mooncake.client import MooncakeClient, import_store, master_answers

logger = logging.getLogger(__name__)

MASTER_END_TIMEOUT_S = 5.0
MASTER_START_TIMEOUT_S = 20.0
FIRST_LEASE_S = 30.0  # how long a fresh daemon waits for its first engine, whatever the linger time
_PORT_ATTEMPTS = 5
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonInfo:
    """What a daemon tells every engine that connects."""

    pid: int
    master_pid: int
    master_address: str
    metrics_port: int
    segment_bytes: int


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Daemon:
    """Serves leases until there is a reason to end."""

    def __init__(
        self, *, directory: Path, master: "subprocess.Popen[bytes]", info: DaemonInfo, linger_s: float
    ) -> None:
        self._directory = directory
        self._master = master
        self._line = (json.dumps(asdict(info)) + "\n").encode()
        self._linger_s = linger_s
        self._selector = selectors.DefaultSelector()
        self._leases: set[socket.socket] = set()
        self._listener = self._listen()
        self._deadline: float | None = time.monotonic() + max(linger_s, FIRST_LEASE_S)
        self._signalled = ""

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.fspath(self._directory / "lease.sock"))
        listener.listen(128)
        listener.setblocking(False)
        self._inode = (self._directory / "lease.sock").stat().st_ino
        return listener

    def run(self) -> str:
        """Serve; answers the reason to end. The socket file is gone then."""
        wake_read, self._wake = socket.socketpair()
        for end in (wake_read, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        self._selector.register(wake_read, selectors.EVENT_READ, "wake")
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        while True:
            reason = self._reason_to_end()
            if reason:
                self._remove_socket()
                return reason
            for key, _ in self._selector.select(self._time_left()):
                self._handle(key)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signalled = signal.Signals(number).name

    def _reason_to_end(self) -> str:
        if self._signalled:
            return self._signalled
        status = self._master.poll()
        if status is not None:
            return f"mooncake_master ended by itself (status {status})"
        if self._deadline is None or time.monotonic() < self._deadline:
            return ""
        return self._end_for_want_of_leases()

    def _end_for_want_of_leases(self) -> str:
        """Only under the folder's lock: then nobody is about to take a lease. Otherwise look again soon."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(descriptor):
            # A connection may wait unaccepted from before we had the lock. The lock is kept until the process ends.
            self._accept_all()
            if not self._leases:
                return f"no engine has used the store for {self._linger_s:g} s"
        os.close(descriptor)
        if not self._leases:
            self._deadline = time.monotonic() + 0.2
        return ""

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _handle(self, key: selectors.SelectorKey) -> None:
        found: Any = key.fileobj
        if key.data == "wake":
            found.recv(4096)
        elif key.data == "listener":
            self._accept_all()
        else:
            self._read_lease(found)

    def _accept_all(self) -> None:
        while True:
            try:
                lease, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("a lease could not be accepted: %s", error)
                return
            self._welcome(lease)

    def _welcome(self, lease: socket.socket) -> None:
        lease.setblocking(False)
        if self._signalled or self._master.poll() is not None:
            lease.close()  # too late: the engine finds no daemon and starts the next one
            return
        try:
            lease.sendall(self._line)
        except OSError:
            lease.close()
            return
        self._leases.add(lease)
        self._selector.register(lease, selectors.EVENT_READ, "lease")
        self._deadline = None
        logger.info("a lease was taken; %d now", len(self._leases))

    def _read_lease(self, lease: socket.socket) -> None:
        """An engine never sends anything: whatever comes is the end of the lease."""
        try:
            if lease.recv(4096):
                logger.warning("a lease sent data, which leases never do; it is ended")
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(lease)
        self._leases.discard(lease)
        lease.close()
        logger.info("a lease ended; %d left", len(self._leases))
        if not self._leases:
            self._deadline = time.monotonic() + self._linger_s

    def _remove_socket(self) -> None:
        """Remove the socket file, unless a newer daemon has put its own there. Leases stay open to the very end."""
        path = self._directory / "lease.sock"
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == self._inode:
                path.unlink()
        self._listener.close()  # not before: while it is open its inode number is not given to another file


def _free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _start_master() -> tuple["subprocess.Popen[bytes]", int, int]:
    """Start a master; answers it, its RPC port and its HTTP port. Tries again if somebody was faster at a port."""
    for _ in range(_PORT_ATTEMPTS):
        rpc_port, metrics_port = _free_ports(2)
        master = subprocess.Popen(
            _master_command(rpc_port, metrics_port),
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  the daemon has one thread at this point
        )
        if _await_master(master, rpc_port):
            return master, rpc_port, metrics_port
        _end_master(master)
    raise StoreError("embedded store", None, f"mooncake_master did not start in {_PORT_ATTEMPTS} attempts")


def _master_command(rpc_port: int, metrics_port: int) -> list[str]:
    return [
        str(_master_binary()),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc_port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",  # else a long line in the log every few seconds; /metrics stays
    ]


def _master_binary() -> Path:
    """The executable inside the installed package (its console script would need a second Python)."""
    package = Path(import_store().__file__).parent
    binary = package / "mooncake_master"
    if not binary.is_file():
        raise StoreError(
            "embedded store", None, f"{package} has no mooncake_master; reinstall mooncake-transfer-engine"
        )
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o111)
    return binary


def _die_with_parent() -> None:
    """In the child: be killed when the daemon dies in whatever way."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _await_master(master: "subprocess.Popen[bytes]", rpc_port: int) -> bool:
    """Wait until the master answers; false if it ended or the time is up."""
    deadline = time.monotonic() + MASTER_START_TIMEOUT_S
    while master.poll() is None and time.monotonic() < deadline:
        if master_answers(f"127.0.0.1:{rpc_port}", 1.0):
            return master.poll() is None
        time.sleep(_POLL_S)
    return False


def _end_master(master: "subprocess.Popen[bytes]") -> None:
    if master.poll() is not None:
        return
    master.terminate()
    try:
        master.wait(MASTER_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        master.kill()
        master.wait(MASTER_END_TIMEOUT_S)


def _mount_memory(master_address: str, segment_bytes: int) -> MooncakeClient:
    settings = load_settings(
        {
            "master_server_address": master_address,
            "local_hostname": "127.0.0.1",
            "global_segment_size": segment_bytes,
        },
        {},
    )
    return MooncakeClient.connect(settings, segment_bytes=segment_bytes, buffer_bytes=0, name="embedded store")


def _serve(directory: Path, segment_bytes: int, linger_s: float, ready: int) -> None:
    """The daemon's life, from its own process on. Does not return."""
    master: subprocess.Popen[bytes] | None = None
    status = 1
    try:
        master, rpc_port, metrics_port = _start_master()
        address = f"127.0.0.1:{rpc_port}"
        owner = _mount_memory(address, segment_bytes)
        info = DaemonInfo(
            pid=os.getpid(),
            master_pid=master.pid,
            master_address=address,
            metrics_port=metrics_port,
            segment_bytes=segment_bytes,
        )
        daemon = _Daemon(directory=directory, master=master, info=info, linger_s=linger_s)
        _tell(ready, "ready\n")
        os.close(ready)
        logger.info("embedded store is up: %s (memory joined as %s)", info, owner.name)
        logger.info("embedded store ends: %s", daemon.run())
        status = 0
    except KvledgerError as error:
        logger.error("embedded store did not start: %s", error)
        _tell(ready, f"{error}\n")
    except Exception:
        logger.exception("embedded store failed")
    finally:
        if master is not None:
            _end_master(master)
        logger.info("embedded store has ended")
        logging.shutdown()
        # Mooncake's own teardown would wait up to 15 s for the master that has just ended, to unmount what ends anyway.
        os._exit(status)


def _tell(ready: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(ready, text.encode())


def main(arguments: list[str] | None = None) -> None:
    """Launch the daemon: fork it off, so that it is nobody's child, and end."""
    parser = argparse.ArgumentParser(prog="python -m kvledger.mooncake.daemon", description=main.__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--segment-bytes", type=int, required=True)
    parser.add_argument("--linger-s", type=float, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)
    os.set_inheritable(options.ready_fd, False)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _serve(options.directory, options.segment_bytes, options.linger_s, options.ready_fd)


if __name__ == "__main__":
    main()
