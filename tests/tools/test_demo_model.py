"""Making the demo's model folder: nothing but the two lines that say so."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the conversion does as far as a person sees it: it imports Triton (by way of transformers) and shows its progress.
MAKE = """
import sys
from pathlib import Path
from demo import model

def make():
    import triton._C.libtriton
    from tqdm.auto import tqdm
    list(tqdm(range(2)))
    folder.mkdir()
    (folder / "config.json").touch()

folder = Path(sys.argv[1])
model.once(folder, make, print)
model.once(folder, make, print)
"""


def test_making_the_folder_shows_no_bars_and_no_leaks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path / "tiny")]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(r"making the model folder tiny \(once\) …\nmade the model folder in \d+ s\n", run.stdout)
