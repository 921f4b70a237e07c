"""Digests of whole checkpoints, kept in the user's cache folder as long as the files look unchanged."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 600.0
"""How long a process waits for another that reads the same checkpoint, before it reads itself."""


def cache_folder() -> Path:
    """Where digests are kept: `$XDG_CACHE_HOME/kvledger`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvledger"


def kept_digest(files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The kept digest of `files` if their sizes, times and inodes are as they were; else `compute()`, then kept.

    Ranks of one host wait for the first of them. A cache folder that cannot be written costs only the keeping.
    """
    name = hashlib.sha256("\n".join(str(p.resolve()) for p in files).encode()).hexdigest()[:32]
    kept = cache_folder() / f"{name}.json"
    try:
        with _locked(kept.with_suffix(".lock")):
            state = [_state(p) for p in files]
            digest = _read(kept, state)
            if digest is None:
                digest = compute()
                if state == [_state(p) for p in files]:
                    temporary = kept.with_suffix(f".{os.getpid()}")
                    temporary.write_text(json.dumps({"state": state, "digest": digest}), encoding="utf-8")
                    temporary.replace(kept)
            return digest
    except OSError as error:
        logger.warning("kvledger: the weights' digest cannot be kept (%s); every start reads all of them", error)
        return compute()


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _read(kept: Path, state: list[list[int]]) -> str | None:
    if not kept.is_file():
        return None
    try:
        content = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError:
        logger.warning("kvledger: %s is not readable, made anew", kept)
        return None
    fits = isinstance(content, dict) and content.get("state") == state and "digest" in content
    return str(content["digest"]) if fits else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold `path` alone; after `LOCK_WAIT_S` go on without."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_WAIT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    logger.warning("kvledger: %s is held for too long; reading the weights beside its holder", path)
                    break
                time.sleep(0.1)
        yield
