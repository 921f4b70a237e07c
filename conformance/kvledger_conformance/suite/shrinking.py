"""Making a script that breaks a property as short and plain as it gets: delta debugging over actions and arguments.

Hypothesis shrinks its own choices; this works on recorded scripts, so it serves scenarios, tours and machines alike,
and it is fast because every attempt is one run of an engine without a model.
"""

import time
from collections.abc import Iterator
from typing import Any

from kvledger_conformance.engine import compat
from kvledger_conformance.suite import targets
from kvledger_conformance.suite.driver import Script, replay
from kvledger_conformance.suite.properties import Impossible, Violation


def shrink(
    target: targets.Target,
    shape: compat.Shape,
    script: Script,
    name: str,
    *,
    past: frozenset[str] = frozenset(),
    budget_s: float = 30.0,
) -> tuple[Script, Violation]:
    """A shorter script that still breaks `name`, and its violation.

    Raises:
        ValueError: the script does not break this property when it is run again.
    """
    deadline = time.monotonic() + budget_s

    def breaks(candidate: Script) -> Violation | None:
        try:
            found = replay(target, shape, candidate, past=past)
        except (Impossible, TimeoutError):
            return None
        return found if found is not None and found.name == name else None

    current = [a for a in script if a["do"] != "finish"]
    best = breaks(current)
    if best is None:
        raise ValueError(f"run again, the script does not break {name}")
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in _shorter(current):
            if time.monotonic() >= deadline:
                break
            found = breaks(candidate)
            if found is not None:
                current, best, progress = candidate, found, True
                break
    return current, best


def _shorter(script: Script) -> Iterator[Script]:
    """Candidates, most promising first: halves left out, single actions left out, simpler arguments."""
    size = len(script) // 2
    while size >= 1:
        for start in range(0, len(script), size):
            yield script[:start] + script[start + size :]
        size //= 2
    for i, action in enumerate(script):
        for simpler in _simpler(action):
            yield [*script[:i], simpler, *script[i + 1 :]]


def _simpler(action: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if action["do"] == "steps":
        yield {"do": "step"}
    for key, value in action.items():
        if key in ("tokens", "tail", "count", "position", "index") and isinstance(value, int) and value > 1:
            yield {**action, key: 1}
            yield {**action, key: value - 1}
        elif key == "blocks" and len(value) > 1:
            yield {**action, key: value[:-1]}
        elif key in ("all_ranks", "running") and value:
            yield {**action, key: False}
        elif key == "pace" and value != "late":
            yield {**action, key: "late"}
        elif (key == "lag" and value != "gpu") or (key in ("stop", "during") and value):
            yield {k: v for k, v in action.items() if k != key}
