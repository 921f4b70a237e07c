"""Recordings (`trace_dir`) as files, and as the TLA+ module `TraceData` that `Trace.tla` walks."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 2
FIELDS: dict[str, tuple[str, ...]] = {
    "BeginGeneration": ("req", "gen", "table", "hashes", "external"),
    "EndGeneration": ("req", "gen", "why"),
    "EndRequest": ("req",),
    "EmitLoad": ("req", "gen", "job", "blocks", "names", "sync"),
    "EmitStore": ("req", "gen", "job", "blocks", "names", "storable", "table", "hashes", "frontier", "retry"),
    "ApplyReport": ("job", "rank", "result", "bad", "retry", "tainted"),
    "Release": ("job", "blocks"),
    "Forget": ("names",),
    "EvictTainted": ("job", "req", "blocks"),
    "Reset": ("loading",),
}
DEFAULTS: dict[str, Any] = {"blocks": [], "names": [], "retry": [], "tainted": []}
REQUESTS, HASHES, COUNTED_FROM_0 = ("tainted", "loading"), ("names", "hashes"), ("retry", "bad")

Event = dict[str, Any]


class NotATraceError(ValueError):
    """The file is not a recording that can be checked; the message says why."""


@dataclass(frozen=True)
class Recording:
    """One engine process."""

    path: Path
    header: Event
    events: list[Event]


def read(path: Path) -> Recording:
    """A recording, plain or gzipped.

    Raises:
        NotATraceError: not JSON lines, no header, a gap in the numbers, or a field that is missing.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [json.loads(line) for line in data.decode().splitlines()]
    except (OSError, EOFError, ValueError) as e:
        raise NotATraceError(f"{path}: {e}") from e
    if not lines or lines[0].get("action") != "Header" or lines[0].get("version") != VERSION:
        raise NotATraceError(f"{path}: the first line is not a Header of version {VERSION}")
    if [e.get("seq") for e in lines] != list(range(len(lines))):
        raise NotATraceError(f"{path}: event numbers have a gap: lines are missing or out of order")
    for event in lines[1:]:
        missing = set(FIELDS.get(event["action"], ())) - event.keys() - DEFAULTS.keys()
        if missing:
            raise NotATraceError(f"{path}: event {event['seq']} ({event['action']}) lacks {sorted(missing)}")
    return Recording(path, lines[0], lines[1:])


@dataclass
class Module:
    """The generated module of recordings that share their constants; requests and hashes become small numbers."""

    recordings: Sequence[Recording]
    requests: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        traces = [[self._number(e) for e in r.events] for r in self.recordings]
        every = [e for r in self.recordings for e in r.events]
        header = self.recordings[0].header
        emitted = [
            sum(e.get("job") is not None for e in r.events if e["action"].startswith("Emit")) for r in self.recordings
        ]
        longest = max([1, *(len(e.get(k, ())) for e in every for k in ("table", "hashes", "blocks"))])
        facts = {
            "NumReqs": max(1, len(self.requests)),
            "NumBlocks": header["blocks"],
            "NumRanks": header["ranks"],
            "NumJobs": max(emitted) + 1,
            "NumResets": max(sum(e["action"] == "Reset" for e in r.events) for r in self.recordings),
            "PinBudget": header["max_pinned"],
            "Retries": header["max_attempts"] - 1,
            "MaxIdx": longest + 1,
            "Events": "<<\n  " + ",\n  ".join(self.events) + ">>",
            "Traces": "<<\n  " + ",\n  ".join(map(_tla, traces)) + ">>",
        }
        lines = [f"{name} == {value}" for name, value in facts.items()]
        return "\n".join(["---- MODULE TraceData ----", "EXTENDS Naturals", *lines, "====", ""])

    def _number(self, event: Event) -> int:
        return self.events.setdefault(self._record(event), len(self.events) + 1)

    def _record(self, event: Event) -> str:
        values = {k: self._value(event, k) for k in FIELDS.get(event["action"], ())}
        return "[" + ", ".join(f"{k} |-> {_tla(v)}" for k, v in {"action": event["action"], **values}.items()) + "]"

    def _value(self, event: Event, key: str) -> Any:
        value: Any = event.get(key, DEFAULTS.get(key))
        if key == "req":
            return self._request(value)
        if key in REQUESTS:
            return [self._request(name) for name in value]
        if key in HASHES:
            return [self.hashes.setdefault(h, f"h{len(self.hashes) + 1}") for h in value]
        if key in COUNTED_FROM_0:  # the model counts block indices and positions from 1
            return [i + 1 for i in value]
        return value

    def _request(self, name: str) -> int:
        return self.requests.setdefault(name, len(self.requests) + 1)


def _tla(value: Any) -> str:
    if value is None:
        return "0"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "<<" + ",".join(map(_tla, value)) + ">>"
    return str(int(value))
