"""Several demos, one reference run and one model folder."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.lock import only_one

ROOT = Path(__file__).resolve().parent.parent.parent
HOLDER = """
import sys
from pathlib import Path
from demo.lock import only_one
with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
BOUND_S = 30.0


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "made" / "here.lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the lock until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_process_at_a_time_and_a_dead_one_holds_nothing(lock: Path, holder: subprocess.Popen[str]) -> None:
    mine = threading.Event()

    def wait() -> None:
        with only_one(lock):
            mine.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not mine.wait(0.3)  # the other process has it
    holder.kill()
    assert mine.wait(BOUND_S)
    waiter.join(BOUND_S)


def test_the_wait_is_bounded_and_names_the_holder(lock: Path, holder: subprocess.Popen[str]) -> None:
    with (
        pytest.raises(TimeoutError, match=f"process {holder.pid} has held {lock} for 0.1 s: .*end it"),
        only_one(lock, 0.1),
    ):
        pytest.fail("two processes have the lock")
