"""Things that several demos may want at the same time are made by one of them; the others wait and then find them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BOUND_S = 900.0  # far above what is made under a lock: a model folder, a reference run
_POLL_S = 0.1


@contextmanager
def only_one(path: Path, bound_s: float = BOUND_S) -> Iterator[None]:
    """One process at a time; the system gives the lock back when its holder dies.

    Raises TimeoutError when another process has held it for ``bound_s`` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + bound_s
    with open(path, "a+", encoding="utf-8") as file:  # not "w": the holder has written its process id
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TimeoutError(
                        f"process {file.read()} has held {path} for {bound_s:g} s: wait for its end, or end it, and start again"
                    ) from None
                time.sleep(_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
