"""What pyproject.toml cannot say: tours need the model, the slices and graph.lock, which a checkout keeps outside the package.

The wheel carries them as `kvledger_conformance/data`, the source distribution as `data`.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent


def gather(data: Path) -> None:
    """Copy the files to where they are packed."""
    shutil.rmtree(data, ignore_errors=True)
    if (HERE / "data").is_dir():  # this is an unpacked source distribution
        shutil.copytree(HERE / "data", data)
        return
    wanted = {
        "model": sorted((HERE.parent / "spec").glob("*.tla")),
        "slices": sorted((HERE / "spec").iterdir()),
        ".": [HERE / "graph.lock", HERE.parent / "LICENSE"],
    }
    for name, files in wanted.items():
        folder = data / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, folder)


class BuildPy(build_py):
    """Modules and data. An editable install finds the data in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            gather(Path(self.build_lib) / "kvledger_conformance" / "data")


class Sdist(sdist):
    """Sources and data."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        gather(Path(base_dir) / "data")


scratch = tempfile.mkdtemp(prefix="build-")  # not ./build: what lies there from another time would be packed too
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
setup(cmdclass={"build_py": BuildPy, "sdist": Sdist}, options={"build": {"build_base": scratch}})
