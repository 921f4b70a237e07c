"""Makes the recordings of `scenarios` with real engines and checks them: `./dev trace run --help`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.recordings import recorded, workload
from conformance.recordings.check import Verdict, check_all
from conformance.recordings.recording import read
from conformance.recordings.scenarios import FAULTS_OF, SCENARIOS, Scenario, by_name
from demo.__main__ import Exit, fail, say
from demo.children import ChildError, Event, run_child
from demo.plan import Plan

EXAMPLE = """\
example:
  ./dev trace run traces --all
  ./dev trace run traces --only storm-tp2,sync-load-failures
  ./dev trace run traces --tp 2 --store-delay 50       the demo itself, recorded: ./dev demo --help has its options
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev trace run",
        description="Record real vLLM engines with kvledger and a real Mooncake store under preemption storms, aborts, "
        "slow and failing stores, resets; then let TLC check every recording.",
        epilog="recordings:\n" + "".join(f"  {s.name:<23} {s.about}\n" for s in SCENARIOS) + "\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="recordings, logs and recordings.json go there")
    parser.add_argument("--all", action="store_true", help="the whole set, a minute each")
    parser.add_argument("--only", metavar="NAMES", help="these of the set, separated by commas")
    options = parser.parse_args(arguments)
    if options.all == bool(options.only):
        parser.error("give either --all or --only NAMES (or options of the demo: ./dev demo --help)")
    known = {s.name for s in SCENARIOS}
    options.names = options.only.split(",") if options.only else [s.name for s in SCENARIOS]
    for name in options.names:
        if name not in known:
            parser.error(f"no recording is called {name!r}; --help lists them")
    return options


def plan_for(scenario: Scenario, model: Path, trace_dir: Path) -> Plan:
    return Plan(
        model=str(model),
        tensor_parallel=scenario.tensor_parallel,
        pool_blocks=scenario.pool_blocks,
        connector="conformance.recordings.faulty:FaultyConnector" if scenario.faults else scenario.connector,
        store_delay_ms=scenario.store_delay_ms,
        load_sync=scenario.load_sync,
        transfer_mode=scenario.transfer_mode,
        trace_dir=str(trace_dir),
        extra=scenario.extra,
    )


def record(scenario: Scenario, target: Path, log: Path) -> dict[str, Any]:
    """One engine process, its events in ``target``; what the workload and the connector counted."""
    from kvledger.mooncake.embedded import running_embedded

    with (
        tempfile.TemporaryDirectory(prefix="kvledger-record-") as name,
        running_embedded(Path(name, "store"), scenario.segment_mib << 20) as store,
    ):
        folder = Path(name)
        model, traces, order, result = (folder / part for part in ("model", "traces", "order.json", "result.json"))
        model.mkdir()
        (model / "config.json").write_text(json.dumps(workload.MODEL | {"num_hidden_layers": scenario.layers}))
        plan = plan_for(scenario, model, traces)
        facts = {"plan": plan.to_json(), "scenario": scenario.name, "result": str(result)}
        order.write_text(json.dumps(facts | {"store_address": store.master_address}))

        def hear(event: Event) -> None:
            if event["event"] == "finished" and event["count"] == scenario.kill_after:
                os.kill(store.master_pid, signal.SIGKILL)

        environment = {
            **plan.environment(),
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # so that ids can be used again
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one thread per rank: the model is tiny, and barriers on shared
            "OMP_NUM_THREADS": "1",  # cores would take most of the time
            FAULTS_OF: scenario.name,
        }
        run_child(scenario.name, ["-m", "conformance.recordings.workload", str(order)], environment, log, hear)
        (path,) = traces.iterdir()
        shutil.move(path, target)
        values: dict[str, Any] = json.loads(result.read_text())
        return values


def happened(path: Path, values: dict[str, Any]) -> Counter[str]:
    """Counts from the recording itself, and of what only the workload or the connector can know."""
    recording = read(path)
    seen = recorded.facts([recording.header, *recording.events]) + Counter(values["counts"])
    seen["given_up"] = values["snapshot"]["declined"]["attempts"]
    seen["left_pinned"] = values["snapshot"]["blocks_pinned"]
    return seen


def judged(scenario: Scenario, said: Verdict) -> tuple[str, bool]:
    """The verdict in words, and whether it is the right one."""
    if said.accepted:
        return ("accepted", True) if scenario.rejected_by is None else ("ACCEPTED, WRONGLY", False)
    if scenario.rejected_by in said.broken:
        return f"rejected at {said.at}", True
    return f"REJECTED at {said.at}", False


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [("recording", "ranks", "events", "verdict", "seconds", "in it")]
    for row in rows:
        what = ", ".join(f"{row['happened'][name]} {name.replace('_', ' ')}" for name in row["shown"])
        lines.append(
            (row["name"], str(row["ranks"]), str(row["events"]), row["verdict"], f"{row['seconds']:.0f}", what)
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join(
        "  ".join([*(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> Exit:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    try:
        for scenario in (s for s in SCENARIOS if s.name in options.names):
            started = time.monotonic()
            target, log = folder / f"{scenario.name}.jsonl", folder / f"{scenario.name}.log"
            say(f"recording {scenario.name}: {scenario.about}")
            values = record(scenario, target, log)
            log.unlink()
            seen = happened(target, values)
            rows.append(
                {
                    "name": scenario.name,
                    "ranks": seen["ranks"],
                    "events": seen["events"],
                    "seconds": time.monotonic() - started,
                    "startup_s": values["startup_s"],
                    "served_s": values["served_s"],
                    "happened": seen,
                    "shown": [m for m in scenario.must if m != "two_ranks"],
                    "missing": [m for m in scenario.must if not seen[m]] + ["released"] * bool(seen["left_pinned"]),
                }
            )
        say("checking with TLC")
        started = time.monotonic()
        said = check_all([folder / f"{row['name']}.jsonl" for row in rows])
        check_s = time.monotonic() - started
    except KeyboardInterrupt:
        say("\ninterrupted: all processes have been ended")
        return Exit.INTERRUPTED
    except ChildError as problem:
        say(problem.tail)
        return fail(str(problem), "the lines above are the end of its log", f"{folder} has the whole log")
    for row, verdict in zip(rows, said, strict=True):
        row["verdict"], row["right"] = judged(by_name(row["name"]), verdict)
        if not verdict.accepted:
            print(verdict.story(), flush=True)
    (folder / "recordings.json").write_text(json.dumps({"recordings": rows, "check_s": check_s}, indent=2) + "\n")
    print(f"{table(rows)}\n\nTLC: {check_s:.0f} s for all of them")
    for row in rows:
        if row["missing"]:
            say(f"wrong: {row['name']} shows too little: {', '.join(row['missing'])}")
    good = all(row["right"] and not row["missing"] for row in rows)
    return Exit.OK if good else Exit.WRONG_RESULT


if __name__ == "__main__":
    sys.exit(main())
