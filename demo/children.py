"""Child processes of the demo: started in a session of their own, logged to a file, heard through a progress pipe."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.progress import FD_VARIABLE

BOUND_S = 3600.0  # far above any run of the demo, so that one that hangs ends
TAIL_LINES = 25
Event = dict[str, Any]


class ChildError(Exception):
    """A child process did not end well; ``tail`` is the end of its log."""

    def __init__(self, name: str, code: int, log: Path, bound_s: float) -> None:
        lines = log.read_text(errors="replace").splitlines()
        self.tail = "\n".join(lines[-TAIL_LINES:])
        killed = f" (killed: out of memory, or not done after {bound_s:g} s)" if code == -signal.SIGKILL else ""
        super().__init__(f"the {name} process ended with code {code}{killed}")


def run_child(
    name: str,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    hear: Callable[[Event], None],
    bound_s: float = BOUND_S,
) -> None:
    """Runs ``python <arguments>`` to its end and hands each of its events to ``hear``. Nothing that it starts outlives
    it, nor this process if it makes a ``Progress``.

    Raises ChildError if it does not end with code 0 within ``bound_s`` seconds."""
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
        bound = threading.Timer(bound_s, end_session, [child])
        bound.start()
        try:
            for line in events:
                hear(json.loads(line))
            code = child.wait()
        finally:
            bound.cancel()
            end_session(child)
    if code:
        raise ChildError(name, code, log, bound_s)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and what it has started; that may be all gone already."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
