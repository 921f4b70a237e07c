"""The set of recordings that ``./dev trace run DIR --all`` makes: real engines under every kind of trouble, told in
``scenarios.toml``.

Only the protocol's events matter here, so the model is tiny and its weights are random; engine, store and connector
are the real ones. Each scenario says what its recording must contain: one in which nothing happened proves nothing.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

FAULTS_OF = "STORE_FAULTS"  # environment variable: whose faults the ranks' clients have
MANY_CALLS = 2000  # faults are scripted by call number, so "every third" needs an end


@dataclasses.dataclass(frozen=True, slots=True)
class StoreFault:
    """A fault of the ranks' store client: calls ``first``, ``first + every``, … of ``operation`` fail."""

    operation: Literal["put", "get"]
    first: int
    every: int
    code: int | None = None  # None: the call raises instead of answering
    positions: tuple[int, ...] = ()  # objects of the call that fail; empty: all
    rank: int | None = None  # None: on every rank


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One recording: one engine process. Prompts share ``documents`` prefixes; each wave serves all of them again,
    after vLLM's own prefix cache has been emptied."""

    name: str
    about: str
    must: tuple[str, ...]
    tensor_parallel: int = 1
    pool_blocks: int = 40
    requests: int = 24
    documents: int = 5
    outstanding: int = 10
    new_tokens: tuple[int, int] = (16, 80)
    waves: int = 1
    aborted: tuple[str, ...] = ()  # phases in which requests are aborted, one request after the other
    abort_every: int = 3
    resets: tuple[tuple[int, str], ...] = ()  # after so many finished requests, when it is "loading" or "quiet"
    kill_after: int | None = None
    segment_mib: int = 256
    layers: int = 2  # of the model: how large a block is
    store_delay_ms: int = 0
    load_sync: bool = False
    transfer_mode: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    faults: tuple[StoreFault, ...] = ()
    connector: str | None = None  # module:class of another connector than kvledger's own
    rejected_by: str | None = None  # negative controls: the rule that the recording must break


def _tuples(told: Any) -> Any:
    """TOML's arrays as tuples."""
    if isinstance(told, dict):
        return {key: _tuples(value) for key, value in told.items()}
    return tuple(map(_tuples, told)) if isinstance(told, list) else told


def _scenario(name: str, faults: Iterable[dict[str, Any]] = (), **facts: Any) -> Scenario:
    return Scenario(name, faults=tuple(StoreFault(**fault) for fault in faults), **facts)


_TOLD = _tuples(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))
SCENARIOS = tuple(_scenario(name, **facts) for name, facts in _TOLD.items())


def by_name(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)
