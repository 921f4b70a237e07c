"""What tests of lookups share: a store client's part in them, six hashes, a key space."""

import threading

from kvledger.keys import KeySpace, parse_key

HASHES = [bytes([i]) * 4 for i in range(6)]
KEYS = KeySpace(namespace="ns")
BOUND_S = 30.0
"""No wait of these tests is longer, by a real clock."""


class Store:
    """The calls of a store client that a lookup makes: `exists` answers by key, may raise, and waits while `works` is not set."""

    def __init__(self) -> None:
        self.answers: dict[tuple[bytes, int], int] = {}
        """By hash and rank; whatever is not named is there."""
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.entered = threading.Event()
        self.works = threading.Event()
        self.works.set()
        self.closed_in: float | None = None

    def exists(self, keys: list[str]) -> list[int]:
        self.asked.append(keys)
        self.entered.set()
        if not self.works.wait(BOUND_S):
            raise TimeoutError("the store of a test hung for too long")
        if self.error is not None:
            raise self.error
        return [self.answers.get((parsed.block_hash, parsed.shard), 1) for parsed in map(parse_key, keys)]

    def close(self, timeout_s: float) -> None:
        self.closed_in = timeout_s

    def chunks(self) -> list[list[bytes]]:
        """The hashes of each question, once each."""
        return [list(dict.fromkeys(parse_key(key).block_hash for key in keys)) for keys in self.asked]
