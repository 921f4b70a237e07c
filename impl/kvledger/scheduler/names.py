"""Names of a request's blocks: vLLM's block hashes, and with an adapter what lies behind it mixed in."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from kvledger.groups import GroupPlan
from kvledger.identity.adapters import Adapters

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Salted(Sequence[bytes]):
    """`hashes` with `salt` mixed in, each when it is asked for: a request has many, a step needs few."""

    def __init__(self, hashes: Sequence[bytes], salt: bytes) -> None:
        self._hashes = hashes
        self._salt = salt

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._mixed(h) for h in self._hashes[index]]
        return self._mixed(self._hashes[index])

    def _mixed(self, block_hash: bytes) -> bytes:
        return hashlib.sha256(self._salt + block_hash).digest()


class BlockNames:
    """What the blocks of requests are called in the store."""

    def __init__(self, plan: GroupPlan, adapters: Adapters) -> None:
        self._plan = plan
        self._adapters = adapters

    def of(self, request: "Request") -> Sequence[bytes] | None:
        """One name per complete block that has a hash; None if its blocks must not be shared (`Adapters.salt`)."""
        salt = self._adapters.salt(getattr(request, "lora_request", None))
        if salt is None:
            return None
        step, hashes = self._plan.hashes_per_block, request.block_hashes
        blocks = hashes if step == 1 else self._plan.block_hashes(hashes, 0, len(hashes) // step)
        return Salted(blocks, salt) if salt else blocks
