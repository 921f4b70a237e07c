"""The audit: every object in the store, compared with KV that an engine without connector computed for its key.

``python -m demo.audit ORDER.json RESULT.json``. It uses Mooncake's own client and nothing of kvledger, so that a fault in
kvledger's client cannot hide itself.

A key ends in ``@<namespace>@r<rank shard>@g<group>@<block hash>``; the block hash says which tokens, the rank which
heads. Recomputed KV may differ in the last bits, since other batch shapes add in another order. So values are compared
as numbers, and an object is *poisoned* when some value is off by more than ``TOLERANCE`` of the object's largest
value, when its size is wrong, or when no request could have its key.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from demo.plan import TOLERANCE
from demo.progress import Progress

KEY = re.compile(r"@r(?P<rank>\d+)[^@]*@g(?P<group>[^@]+)@(?P<hash>[0-9a-f]+)$")
EXAMPLES = 5  # poisoned objects named in the report


@dataclasses.dataclass(slots=True)
class Findings:
    """What the audit saw. ``wrong`` counts poisoned objects by what is wrong with them."""

    audited: int = 0
    bit_identical: int = 0
    max_error: float = 0.0
    wrong: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def poisoned(self) -> int:
        return sum(self.wrong.values())

    def blame(self, fault: str, key: str, detail: str) -> None:
        self.wrong[fault] = self.wrong.get(fault, 0) + 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{key}: {detail}")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"poisoned": self.poisoned}


class Expected:
    """The records that the reference engine wrote: one file per rank, one record per block hash."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.slots: dict[str, int] = index["slots"]
        self.records = [
            np.memmap(folder / f"kv_rank{rank}.bin", dtype=np.uint8, mode="r").reshape(-1, size)
            for rank, size in enumerate(index["record_bytes"])
        ]

    def find(self, rank: int, block_hash: str) -> np.ndarray[Any, Any] | None:
        slot = self.slots.get(block_hash)
        return None if slot is None or rank >= len(self.records) else self.records[rank][slot]


def as_numbers(data: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Bytes of float32, float16 or bfloat16 as float32 values."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=dtype).astype(np.float32)


def relative_error(actual: Any, expected: Any, dtype: str) -> float:
    """Largest difference, as a share of the largest expected value; infinite where a value is not a number."""
    wanted, got = as_numbers(expected, dtype), as_numbers(actual, dtype)
    difference = np.abs(got - wanted)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(float(np.abs(wanted).max()), 1e-30))


def audit(
    keys: Iterable[str],
    get: Callable[[str], bytes],
    expected: Expected,
    dtype: str,
    tolerance: float = TOLERANCE,
    seen: Callable[[int], object] = int,
) -> Findings:
    """Looks at every object; ``get`` answers an empty value for an object that cannot be read."""
    findings = Findings()
    for key in keys:
        findings.audited += 1
        seen(findings.audited)
        match = KEY.search(key)
        record = match and expected.find(int(match["rank"]), match["hash"])
        if match is None or record is None:
            findings.blame("unknown key", key, "no request of this run could have this key")
            continue
        data = get(key)
        if not data:
            findings.blame("unreadable", key, "listed, but the store does not hand it out")
        elif len(data) != len(record):
            findings.blame("wrong size", key, f"{len(data)} bytes, should be {len(record)}")
        elif data == record.tobytes():
            findings.bit_identical += 1
        else:
            error = relative_error(data, record.tobytes(), dtype)
            findings.max_error = max(findings.max_error, error)
            if error > tolerance:
                findings.blame("wrong bytes", key, f"off by {error:.2g} of its largest value")
    return findings


def store_client(address: str) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", address)
    if code:
        raise RuntimeError(f"the audit's store client cannot reach {address}: Mooncake error {code}")
    return store


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    progress = Progress()
    keys: list[str] = order["keys"]
    store = store_client(order["store_address"])
    step = max(1, len(keys) // 4)

    def seen(count: int) -> None:
        if count % step == 0:
            progress.send("audited", count=count, total=len(keys))

    expected = Expected(Path(order["dump"]["folder"]), order["dump"])
    findings = audit(keys, store.get, expected, order["dump"]["dtype"], seen=seen)
    Path(sys.argv[2]).write_text(json.dumps(findings.as_dict()))
    store.close()


if __name__ == "__main__":
    main()
