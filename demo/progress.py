"""Lines from a child process to its parent: a pipe of its own, since vLLM logs to stdout and stderr."""

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

FD_VARIABLE = "KVLEDGER_DEMO_PROGRESS_FD"


def when_unread(pipe: int, then: Callable[[], object]) -> None:
    """Calls ``then`` from a thread of its own once nobody can read from ``pipe`` any more, however that came about."""

    def wait() -> None:
        unread = select.poll()
        unread.register(pipe, 0)  # that the reader's end is closed is always told
        unread.poll()
        then()

    threading.Thread(target=wait, name="when-unread", daemon=True).start()


class Progress:
    """The child's end. Each event is one JSON line with ``event`` and its fields; without a pipe, nothing happens.

    The child ends with its parent: when the parent has gone, its whole process group is killed, vLLM's workers too."""

    def __init__(self) -> None:
        fd = os.environ.get(FD_VARIABLE)
        self._pipe = os.fdopen(int(fd), "w", buffering=1) if fd else None
        if self._pipe:
            os.set_inheritable(self._pipe.fileno(), False)
            when_unread(self._pipe.fileno(), lambda: os.killpg(0, signal.SIGKILL))

    def send(self, event: str, **fields: Any) -> None:
        if self._pipe:
            self._pipe.write(json.dumps({"event": event, **fields}) + "\n")
