"""What a recording has said so far: to find a place in it for a corruption."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance.recordings.recording import Event


@dataclass
class Known:
    """What a recording has said before an event."""

    budget: int = 0
    jobs: dict[int, Event] = field(default_factory=dict)  # open jobs
    pinned: set[int] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)  # names in finished stores
    tables: dict[str, list[int]] = field(default_factory=dict)  # of current generations
    gens: dict[str, int] = field(default_factory=dict)
    retry: dict[str, list[int]] = field(default_factory=dict)
    frontier: dict[str, int] = field(default_factory=dict)
    next_job: int = 1
    last_gen: int = 0

    @property
    def loads(self) -> list[Event]:
        """Open ones, the oldest first."""
        return [job for job in self.jobs.values() if job["action"] == "EmitLoad"]

    def take(self, event: Event) -> None:
        action: str = event["action"]
        req: str = event.get("req", "")
        if action == "Header":
            self.budget = event["max_pinned"]
        elif action == "BeginGeneration":
            self.gens[req], self.last_gen = event["gen"], event["gen"]
            self.tables[req], self.retry[req], self.frontier[req] = event["table"], [], 0
        elif action in ("EndGeneration", "EndRequest"):
            self.gens.pop(req, None)
            self.tables.pop(req, None)
        elif action == "EmitStore":
            self.tables[req], self.retry[req], self.frontier[req] = event["table"], event["retry"], event["frontier"]
        if action in ("EmitLoad", "EmitStore") and event["job"] is not None:
            self.jobs[event["job"]] = event
            self.next_job = event["job"] + 1
            self.pinned |= set(event["blocks"]) if action == "EmitStore" else set()
        elif action == "ApplyReport" and "retry" in event:
            done = self.jobs.pop(event["job"])
            stores = [e for e in self.jobs.values() if e["action"] == "EmitStore"]
            self.pinned = {b for e in stores for b in e["blocks"]}
            if done["action"] == "EmitStore":
                self.retry[done["req"]] = event["retry"]
                self.stored |= set(done["names"])
        elif action == "Reset":
            self.gens = {r: g for r, g in self.gens.items() if r in event["loading"]}


def first(
    events: list[Event], action: str, wanted: Callable[[Event, Known], Any] = lambda e, k: True
) -> tuple[int, Known]:
    """The first event of a kind that fits, and what was known before it."""
    known = Known()
    for i, event in enumerate(events):
        if event["action"] == action and wanted(event, known):
            return i, known
        known.take(event)
    raise LookupError(f"the recording has no {action} that could be corrupted like this")
