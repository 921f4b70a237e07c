"""One transfer call of the stand-in: what it touches, where it stands, and what is scripted to happen to it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

PHASES = ("before", "during", "after")
HOLD_TIMEOUT_S = 120.0
FAULT_KINDS = ("code", "raise", "raise_after", "short", "long", "none", "late")


def read_segments(segments: Sequence[tuple[int, int]]) -> bytes:
    """The bytes at these addresses."""
    return b"".join(ctypes.string_at(address, size) for address, size in segments)


def write_segments(segments: Sequence[tuple[int, int]], data: bytes) -> None:
    """Write `data` to these addresses, in order, as far as it reaches."""
    start = 0
    for address, size in segments:
        part = data[start : start + size]
        ctypes.memmove(address, part, len(part))
        start += len(part)


@dataclass
class Fault:
    """What happens to the next `times` calls (None: to all) of `operation` by `client` (None: by any).

    Kinds: "code" answers `code`, for `positions` or for all, nothing moving there; "raise" raises before anything
    moves, "raise_after" when everything has moved; "short" leaves the last key out, of the transfer and of the answer;
    "long" answers an entry too many, "none" answers None; "late" answers -800 while the bytes go on moving until `World.land`.
    """

    operation: str
    kind: str
    client: str | None = None
    code: int = -1
    positions: tuple[int, ...] | None = None
    times: int | None = 1

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"fault kind {self.kind!r} is not one of {FAULT_KINDS}")

    @property
    def refuses_all(self) -> bool:
        """Whether the call does nothing but answer a code."""
        return self.kind == "code" and self.positions is None

    def spares(self, position: int) -> bool:
        """Whether this position is answered with the code instead of being transferred."""
        return self.kind == "code" and (self.positions is None or position in self.positions)

    def omits(self, position: int, keys: int) -> bool:
        """Whether this position is left out altogether."""
        return self.kind == "short" and position == keys - 1

    def change(self, answer: list[int]) -> list[int]:
        """What the call answers instead of its real answer (codes are in it already); "none" breaks the promised type."""
        if self.kind == "raise_after":
            raise RuntimeError(f"scripted: {self.operation} raised after its transfer")
        if self.kind == "long":
            return [*answer, 0]
        return cast(list[int], None) if self.kind == "none" else answer

    def __str__(self) -> str:
        who = self.client or "any client"
        what = f"code {self.code}" if self.kind == "code" else self.kind
        where = "" if self.positions is None else f" at {list(self.positions)}"
        return f"{who}.{self.operation}: {what}{where}" + ("" if self.times is None else f" x{self.times}")


@dataclass(eq=False)
class Transfer:
    """One call. `segments[i]` are the (address, size) pairs of key i; `at` is the gate it waits at."""

    number: int
    client: str
    operation: str
    keys: list[str]
    segments: list[list[tuple[int, int]]]
    serial: int = 0
    """Number among this client's calls of this operation: unlike `number`, a function of the script."""
    fault: Fault | None = None
    in_call: bool = True
    at: str | None = None
    late: bool = False
    late_steps: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plan: list[tuple[list[tuple[int, int]], bytes]] = []

    def start_late(self, plan: list[tuple[list[tuple[int, int]], bytes]]) -> None:
        """The call gives up; `plan` is what a late get still has to write."""
        self.late, self._plan = True, plan

    def finish_late(self) -> None:
        """The bytes arrive."""
        for segments, data in self._plan:
            write_segments(segments, data)
        self.late, self._plan = False, []

    def __str__(self) -> str:
        where = f" held {self.at}" if self.at else " late" if self.late else ""
        return f"{self.client}.{self.operation}#{self.serial}({len(self.keys)} keys){where}"
