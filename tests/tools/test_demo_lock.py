"""Several demos, one reference run and one model folder."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest

from demo.lock import only_one

ROOT = Path(__file__).resolve().parents[2]
DIES = """
import os, signal, sys
from pathlib import Path
from demo.lock import only_one
with only_one(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "made" / "here.lock"


def test_one_at_a_time(lock: Path) -> None:
    with ThreadPoolExecutor() as other:
        with only_one(lock):
            mine = other.submit(only_one(lock, 30.0).__enter__)
            with pytest.raises(NotYet):
                mine.result(0.3)
        mine.result(30.0)


def test_the_dead_hold_nothing(lock: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(lock)], check=False, cwd=ROOT)
    assert died.returncode < 0
    with only_one(lock, 0.1):
        pass


def test_the_wait_is_bounded_and_names_the_holder(lock: Path) -> None:
    told = f"process {os.getpid()} has held {lock} for 0.1 s: .*end it"
    with only_one(lock), pytest.raises(TimeoutError, match=told), only_one(lock, 0.1):
        pytest.fail("two have the lock")
