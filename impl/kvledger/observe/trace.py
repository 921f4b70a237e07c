"""Records the protocol's events as JSON lines, so that TLC can say whether a real run is a behaviour of the model.

One event per scheduler-side action of the model, under the model's name, written where the action takes effect. All
come from one thread (vLLM's EngineCore loop), so the order of lines is the order of events; `seq` numbers them. A
rank's report is recorded where the scheduler side applies it. A recorder that fails is removed and logged once; the
run goes on.

| event | fields |
| --- | --- |
| `Header` | `version`, `ranks`, `blocks`, `block_size`, `max_pinned`, `max_attempts` |
| `BeginGeneration` | `req`, `gen`, `table` (block ids at admission), `hashes` (of its named blocks), `external` (tokens to load) |
| `EndGeneration` | `req`, `gen`, `why` (preempted, finished) |
| `EndRequest` | `req`: it ended without a generation (it waited, or was preempted) |
| `EmitLoad` | `req`, `gen`, `job`, `blocks`, `names` (hashes of these blocks), `sync` |
| `EmitStore` | `req`, `gen`, `storable`; `table`, `hashes`; `job` (or null), `blocks`, `names`; `frontier`, `retry` |
| `ApplyReport` | `job`, `rank`, `result`, `bad` (positions); if it settles the job: `retry` of its request, `tainted` (requests) |
| `Release` | `job`, `blocks` (tail first) |
| `Forget` | `names` (hashes that a lookup or a load did not find) |
| `EvictTainted` | `job`, `req`, `blocks` (that rest on a failed synchronous load and leave vLLM's prefix cache) |
| `Reset` | `epoch`, `loading` (requests whose load goes on) |
"""

import json
import logging
import os
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

VERSION = 2


class TraceRecorder:
    """Writes one file per engine process. `record` never raises."""

    def __init__(self, folder: str, **header: Any) -> None:
        self._seq = 0
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path / f"trace-{os.getpid()}-{id(self):x}.jsonl"
        self._file: IO[str] | None = self.path.open("w", encoding="utf-8", buffering=1 << 16)
        self.record("Header", version=VERSION, **header)

    def record(self, action: str, **fields: Any) -> None:
        """Append one event."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"seq": self._seq, "action": action, **fields}, separators=(",", ":")) + "\n")
            self._seq += 1
        except (OSError, TypeError, ValueError) as e:
            logger.warning("kvledger: trace recording stopped at event %d: %s: %s", self._seq, type(e).__name__, e)
            self.close()

    def close(self) -> None:
        """Flush and end the recording."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as e:
                logger.warning("kvledger: trace file %s could not be closed: %s", self.path, e)


def short(block_hash: bytes) -> str:
    """A hash as it stands in events: 16 hex digits tell blocks of one run apart."""
    return block_hash[-8:].hex()
