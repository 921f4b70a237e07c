"""Hashes that every rank is known to have stored, within a bound.

What may live here: the set and its bound. Model: the variable `known`, properties `KnownIsStored` and `MissForgets`.
A wrong entry costs a hit, never data: entries go when a lookup misses them, on reset, and oldest first beyond `capacity`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class KnownHashes:
    """A least-recently-noted set of block hashes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Iterable[bytes]) -> None:
        """Note hashes as stored, dropping the oldest beyond the capacity."""
        for h in hashes:
            self._seen[h] = None
            self._seen.move_to_end(h)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Forget hashes that a lookup did not find."""
        for h in hashes:
            self._seen.pop(h, None)

    def clear(self) -> None:
        """Forget everything (cache reset)."""
        self._seen.clear()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._seen)

    def __contains__(self, h: object) -> bool:
        return h in self._seen

    def __len__(self) -> int:
        return len(self._seen)
