# ruff: noqa: N802 - methods have the names of the events
"""What happened in a recording, counted from its events: so that a scenario can say what must be in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from conformance.recordings.recording import Event

STORE_RESULTS = {"REFUSED": "refused", "FAILED": "failed_stores", "INDETERMINATE": "indeterminate_stores"}


def facts(events: Iterable[Event]) -> Counter[str]:
    """How often each thing happened. Names are those of ``Scenario.must``."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.seen


class _Reader:
    """Counts; one method per event that counts for something, with its name."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._stores: dict[int, Event] = {}
        self._generation: dict[str, int] = {}
        self._loads: dict[int, str] = {}
        self._bad: set[int] = set()  # jobs of which something failed
        self._ended: set[str] = set()  # requests that finished or were aborted
        self._retry: dict[str, list[int]] = {}

    def take(self, event: Event) -> None:
        self.seen["events"] += event["action"] != "Header"
        getattr(self, event["action"], lambda _event: None)(event)

    def Header(self, event: Event) -> None:
        self.seen["ranks"] = event["ranks"]
        self.seen["two_ranks"] = int(event["ranks"] == 2)

    def BeginGeneration(self, event: Event) -> None:
        self.seen["ids_reused"] += event["req"] in self._ended
        self._retry[event["req"]] = []
        self._generation[event["req"]] = event["gen"]

    def EndGeneration(self, event: Event) -> None:
        if event.get("why") == "preempted":
            self.seen["preempted"] += 1
        else:
            self._ended.add(event["req"])

    EndRequest = EndGeneration

    def EmitLoad(self, event: Event) -> None:
        self._loads[event["job"]] = "sync_loads" if event["sync"] else "loads"

    def EmitStore(self, event: Event) -> None:
        if event["job"] is not None:
            self._stores[event["job"]] = event
            table = event["table"]
            again = {table[i] for i in self._retry.get(event["req"], []) if i < len(table)}
            self.seen["retried"] += bool(again & set(event["blocks"]))
        self._retry[event["req"]] = event["retry"]

    def ApplyReport(self, event: Event) -> None:
        job, over = event["job"], "retry" in event
        if event["bad"]:
            self._bad.add(job)
        if job in self._stores:
            if event["result"] in STORE_RESULTS:
                self.seen[STORE_RESULTS[event["result"]]] += 1
            self.seen["stores_done"] += over and job not in self._bad
            store = self._stores[job]
            self.seen["late_stores"] += over and self._generation[store["req"]] > store["gen"]
        elif over:
            self.seen[f"{self._loads[job]}_{'failed' if job in self._bad else 'done'}"] += 1
        self.seen["dropped"] += event["result"] == "DROPPED"
        self.seen["tainted"] += len(event.get("tainted", ()))
        self.seen["sharers_tainted"] += len(event.get("tainted", ())) > 1

    def EvictTainted(self, event: Event) -> None:
        self.seen["evicted"] += bool(event["blocks"])

    def Reset(self, event: Event) -> None:
        self.seen["reset"] += 1
        self.seen["reset_while_loading"] += bool(event["loading"])
