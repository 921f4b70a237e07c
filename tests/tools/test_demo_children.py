"""The demo's child processes: none outlives the demo, and one that fails says why."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.children import ChildError, Event, run_child

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 30.0
# As an engine with a rank: the child has a child of its own, which knows nothing of pipes.
TREE = """
import os, signal, subprocess, sys
from demo.progress import Progress
progress = Progress()
rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
progress.send("up", pids=[os.getpid(), rank.pid])
signal.pause()
"""
PARENT = f"""
import os, sys
from pathlib import Path
from demo.children import run_child
run_child("tree", ["-c", {TREE!r}], os.environ, Path(sys.argv[1]), lambda event: print(*event["pids"], flush=True))
"""


@pytest.fixture
def watched() -> Iterator[list[int]]:
    """Descriptors of processes that a test waits for, though they are nobody's children here; ended with the test."""
    fds: list[int] = []
    yield fds
    for fd in fds:
        if not ended([fd], 0.0):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def ended(fds: list[int], within_s: float = BOUND_S) -> bool:
    deadline = time.monotonic() + within_s
    return all(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] for fd in fds)


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path, watched: list[int]) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        watched += [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(watched) == 2
        assert not any(ended([fd], 0.0) for fd in watched)
        parent.kill()
        assert ended(watched)


def test_children_end_when_the_parent_stops_listening(tmp_path: Path, watched: list[int]) -> None:
    def interrupt(event: Event) -> None:
        watched.extend(os.pidfd_open(pid) for pid in event["pids"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child("tree", ["-c", TREE], os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path / "log", interrupt)
    assert ended(watched)


def test_a_child_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"the engine process ended with code -9 \(.*not done after 0.1 s\)"):
        run_child("engine", ["-c", "import signal; signal.pause()"], os.environ, tmp_path / "log", print, bound_s=0.1)


def test_a_child_that_fails_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="the engine process ended with code 1") as problem:
        run_child("engine", ["-c", "raise RuntimeError('no room')"], os.environ, tmp_path / "log", print)
    assert problem.value.tail.endswith("RuntimeError: no room")
