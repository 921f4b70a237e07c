"""Child processes of the demo: started in a session of their own, logged to a file, heard through a progress pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.progress import FD_VARIABLE

TAIL_LINES = 25
Event = dict[str, Any]


class ChildError(Exception):
    """A child process did not end well; ``tail`` is the end of its log."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        self.tail = "\n".join(lines[-TAIL_LINES:])
        super().__init__(f"the {name} process ended with code {code}")


def run_child(
    name: str,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    hear: Callable[[Event], None],
) -> None:
    """Runs ``python <arguments>`` to its end and hands each of its events to ``hear``."""
    reading, writing = os.pipe()
    with open(log, "wb") as output, os.fdopen(reading, encoding="utf-8") as events:
        try:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, FD_VARIABLE: str(writing)},
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            for line in events:
                hear(json.loads(line))
            code = child.wait()
        finally:
            end_session(child)
    if code:
        raise ChildError(name, code, log)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Nothing the child started outlives it, whatever made us stop."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
