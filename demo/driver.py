"""The order of events: store, reference engine, cold engine, warm engine, audit."""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import report
from demo.children import Event, run_child
from demo.engine import Order
from demo.lock import only_one
from demo.plan import SEGMENT_BYTES, Plan

Say = Callable[[str], None]

KILL_AFTER = 1 / 3  # share of the requests that has finished when --kill-master strikes

ABOUT = {
    "reference": "reference engine: no connector, a pool with room for everything",
    "cold": "cold engine: kvledger, an empty store, a KV pool that is too small",
    "warm": "warm engine: a new process with an empty cache, the same prompts, the same store",
}


@dataclasses.dataclass(slots=True)
class Driver:
    """Runs one plan in ``folder`` (orders, results, logs, the store's files). The reference run's outputs and KV are
    kept in ``references``, and not made again when they are there."""

    plan: Plan
    folder: Path
    references: Path
    say: Say
    started: float = dataclasses.field(default_factory=time.monotonic)

    def run(self) -> dict[str, Any]:
        from kvledger.mooncake.embedded import list_keys, running_embedded

        runs = {"reference": self.reference()}
        with running_embedded(self.folder / "store", SEGMENT_BYTES) as store:
            address = store.master_address
            self.tell("store", f"a Mooncake store of {SEGMENT_BYTES >> 30} GiB runs on {address}")
            kill = (lambda: os.kill(store.master_pid, signal.SIGKILL)) if self.plan.kill_master else None
            runs["cold"] = self.engine("cold", on_share=kill, store_address=address)
            if self.plan.kill_master:
                return report.summarize(self.plan, runs, None)
            if not self.plan.cold_only:
                runs["warm"] = self.engine("warm", store_address=address)
            findings = self.audit(address, list_keys(store.metrics_port), self.complete(runs))
        return report.summarize(self.plan, runs, findings)

    def reference(self) -> dict[str, Any]:
        """What every output and every object should be, from this run or an earlier one of the same plan."""
        home = self.references / f"reference-{self.plan.reference_key()}"
        done = home / "reference.json"
        with only_one(home.with_suffix(".lock")):
            if done.exists():
                self.tell("reference", f"from an earlier run: {home}")
            else:
                home.mkdir(parents=True, exist_ok=True)
                result = self.engine("reference", dump_dir=str(home))
                result["dump"]["folder"] = str(home)
                unfinished = done.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(result))
                unfinished.rename(done)
        kept: dict[str, Any] = json.loads(done.read_text())
        return kept

    def tell(self, phase: str, text: str) -> None:
        self.say(f"{time.monotonic() - self.started:6.1f} s  {phase:<9}  {text}")

    def engine(
        self,
        role: str,
        on_share: Callable[[], None] | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """One engine process; ``on_share`` is called once, when ``KILL_AFTER`` of the requests have finished."""
        self.tell(role, ABOUT[role])
        struck = False

        def hear(event: Event) -> None:
            nonlocal struck
            if event["event"] == "serving":
                self.tell(role, f"up after {event['startup_s']:.0f} s, serving")
            elif event["event"] == "finished":
                count, total = event["count"], event["total"]
                if count * 4 // total > (count - 1) * 4 // total:
                    self.tell(role, f"{count} of {total} requests finished")
                if on_share and not struck and count >= total * KILL_AFTER:
                    struck = True
                    on_share()
                    self.tell("store", "the Mooncake master has been killed")

        order = dataclasses.asdict(Order(role=role, plan=self.plan, **fields))
        return self.child(name or role, "demo.engine", order, hear)

    def child(self, name: str, module: str, order: dict[str, Any], hear: Callable[[Event], None]) -> dict[str, Any]:
        """The result of ``python -m <module> ORDER.json RESULT.json``."""
        told, result, log = (self.folder / f"{name}.{end}" for end in ("order.json", "json", "log"))
        told.write_text(json.dumps(order))
        run_child(name, ["-m", module, str(told), str(result)], self.plan.environment(), log, hear)
        values: dict[str, Any] = json.loads(result.read_text())
        return values

    def complete(self, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The index of the reference KV. Where outputs differ, the sequences that the engines really had are
        recomputed too, so that the audit judges each object by the tokens of its own key."""
        reference = runs["reference"]
        sequences = {
            tuple(prompt + tokens)
            for run in runs.values()
            for prompt, tokens in zip(reference["prompts"], run["tokens"], strict=True)
        }
        strange = len(sequences) - len(reference["prompts"])
        if not strange:
            return reference["dump"]  # type: ignore[no-any-return]
        self.tell("reference", f"once more, for the KV of {strange} sequences that came out differently")
        again = self.engine(
            "reference", name="reference-again", dump_dir=str(self.folder), prefill=sorted(map(list, sequences))
        )
        return {**again["dump"], "folder": str(self.folder)}

    def audit(self, address: str, keys: list[str], dump: dict[str, Any]) -> dict[str, Any]:
        self.tell("audit", f"every object in the store against the reference KV: {len(keys)} objects")

        def hear(event: Event) -> None:
            self.tell("audit", f"{event['count']} of {event['total']} objects compared")

        return self.child("audit", "demo.audit", {"keys": keys, "store_address": address, "dump": dump}, hear)
