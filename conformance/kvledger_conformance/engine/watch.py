"""When the other threads of this process have nothing left to do: determinism with real transfer threads.

A connector's threads are its own business, so the harness cannot ask them. It asks the kernel: the process is settled
when every thread but the caller's sleeps and none has run between two looks. A thread that waits for Python's
interpreter lock is woken by the pause between the looks, and so counts as not settled.
"""

import os
import threading
import time

PAUSE_S = 0.0003
TIMEOUT_S = 60.0


def _read(path: str) -> bytes:
    """A file of the kernel's; plain calls, for this is most of what the suite does."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1024)
    finally:
        os.close(fd)


def _look(own: str) -> dict[str, tuple[str, str]] | None:
    """Run time of every other thread, or None if one is not asleep."""
    seen = {}
    for tid in os.listdir("/proc/self/task"):
        if tid == own:
            continue
        try:
            state = _read(f"/proc/self/task/{tid}/stat").rpartition(b")")[2][1:2]
            ran = _read(f"/proc/self/task/{tid}/schedstat").split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if state != b"S":
            return None
        seen[tid] = (ran[0].decode(), ran[2].decode())
    return seen


def settle(timeout_s: float = TIMEOUT_S, pause_s: float = PAUSE_S) -> None:
    """Return when no other thread runs. Raises TimeoutError if one never rests."""
    own = str(threading.get_native_id())
    deadline = time.monotonic() + timeout_s
    before = _look(own)
    while True:
        time.sleep(pause_s)
        after = _look(own)
        if after is not None and after == before:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"a thread of the connector was still running after {timeout_s:g} s")
        before = after
