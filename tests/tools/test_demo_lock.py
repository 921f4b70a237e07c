"""Several demos, one reference run and one model folder."""

import subprocess
import sys
import threading
from pathlib import Path

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


def test_one_process_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    lock, mine = tmp_path / "made" / "here.lock", threading.Event()

    def wait() -> None:
        with only_one(lock):
            mine.set()

    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not mine.wait(0.3)  # the other process has it
        holder.kill()
        assert mine.wait(BOUND_S)
        waiter.join(BOUND_S)
