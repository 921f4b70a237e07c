"""Lines from a child process to the person who waits: a pipe of its own, since vLLM logs to stdout and stderr."""

from __future__ import annotations

import json
import os
from typing import Any

FD_VARIABLE = "KVLEDGER_DEMO_PROGRESS_FD"


class Progress:
    """The child's end. Each event is one JSON line with ``event`` and its fields; without a pipe, nothing happens."""

    def __init__(self) -> None:
        fd = os.environ.get(FD_VARIABLE)
        self._pipe = os.fdopen(int(fd), "w", buffering=1) if fd else None
        if self._pipe:
            os.set_inheritable(self._pipe.fileno(), False)

    def send(self, event: str, **fields: Any) -> None:
        if self._pipe:
            self._pipe.write(json.dumps({"event": event, **fields}) + "\n")
