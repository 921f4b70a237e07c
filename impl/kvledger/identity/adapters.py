"""Adapters by content: vLLM's block hash covers an adapter's name and path, this what lies behind them."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvledger.identity.weights import SUFFIXES, weights_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
# Of the adapter's configuration: names of things, no numbers.
_VOLATILE = ("base_model_name_or_path", "revision", "peft_version", "inference_mode")


@dataclass(slots=True)
class Seen:
    """An adapter as it was at its first request. `salt` None: it cannot be told what an engine computes with it."""

    state: tuple[tuple[str, int, int, int, int], ...]
    salt: bytes | None


class Adapters:
    """The adapters of this engine. One thread.

    vLLM reads an adapter once and keeps it, or not: when its files change later, nobody outside can tell which of the
    two a block was computed with. So from then on nothing is shared under that path until the engine is restarted.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def salt(self, lora: "LoRARequest | None") -> bytes | None:
        """What is mixed into block hashes for the adapter: `b""` without one, None if blocks must not be shared.

        The first call for a path reads the adapter; later ones look at its files' sizes, times and inodes.
        """
        if lora is None:
            return b""
        path = Path(lora.lora_path).expanduser()
        state = _state(path)
        seen = self._seen.get(lora.lora_path)
        if seen is None:
            seen = self._seen[lora.lora_path] = Seen(state, _content(path, lora) if state else None)
            if seen.salt is None:
                self._warn(lora, "its files are not in a folder on this host; give its path instead of a name")
        elif seen.salt is not None and seen.state != state:
            seen.salt = None
            self._warn(lora, "its files changed; restart the engine, or load the new ones under another path")
        return seen.salt

    @staticmethod
    def _warn(lora: "LoRARequest", why: str) -> None:
        logger.warning(
            "kvledger: blocks of adapter %r (lora_path %s) are neither stored nor loaded: %s",
            lora.lora_name,
            lora.lora_path,
            why,
        )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.name == CONFIG or p.suffix in SUFFIXES)


def _state(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    found = []
    for file in _files(path):
        stat = file.stat()
        found.append((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)


def _content(path: Path, lora: "LoRARequest") -> bytes:
    files = _files(path)
    config = json.loads((path / CONFIG).read_text(encoding="utf-8")) if path / CONFIG in files else {}
    facts = {
        "config": {name: value for name, value in config.items() if name not in _VOLATILE},
        "weights": weights_digest([p for p in files if p.name != CONFIG]),
        "3d": bool(getattr(lora, "is_3d_lora_weight", False)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
