"""The key space: which object in the store holds which bytes.

Key: `kvl1@[<cache_prefix>@]<fingerprint>[.<epoch>]@r<rank shard>@g<group>@<block hash in hex>`. Two engines share
objects exactly when everything that decides the bytes is equal, because all of it is in the fingerprint. Tokens are
never hashed here: block hashes come from vLLM, which covers tokens, parents, multimodal inputs, salt, and an adapter's
name and path; what lies behind these `scheduler/names.py` has mixed in.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

FORMAT = "kvl1"


def fingerprint(facts: Mapping[str, object]) -> str:
    """64 bits of SHA-256, in hex, over `facts` in canonical JSON. Order does not matter, every value does."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """Names objects. `cache_prefix` separates deployments by hand; `namespace` does by what the bytes depend on."""

    namespace: str
    cache_prefix: str = ""

    def prefix(self, epoch: str = "") -> str:
        """What every key of this namespace and epoch begins with."""
        name = f"{self.namespace}.{epoch}" if epoch else self.namespace
        return "@".join(part for part in (FORMAT, self.cache_prefix, name) if part) + "@"

    def object_key(self, *, shard: int, group: int, block_hash: bytes, epoch: str = "") -> str:
        """Key of one rank's shard of one block."""
        return f"{self.prefix(epoch)}r{shard}@g{group}@{block_hash.hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedKey:
    """The parts of an object key."""

    namespace: str
    cache_prefix: str
    shard: int
    group: int
    block_hash: bytes


def parse_key(key: str) -> ParsedKey:
    """Take an object key apart, from the right (a cache prefix may contain `@`).

    Raises:
        ValueError: `key` is not one of ours.
    """
    parts = key.split("@")
    if len(parts) < 5 or parts[0] != FORMAT or parts[-3][:1] != "r" or parts[-2][:1] != "g":
        raise ValueError(f"not a kvledger object key: {key!r}")
    return ParsedKey(
        namespace=parts[-4],
        cache_prefix="@".join(parts[1:-4]),
        shard=int(parts[-3][1:]),
        group=int(parts[-2][1:]),
        block_hash=bytes.fromhex(parts[-1]),
    )
