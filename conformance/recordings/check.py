"""Lets TLC decide whether recordings of real engine runs (`trace_dir`) are behaviours of the model's scheduler side.

    ./dev trace check FILE…  [--json FILE]

On rejection: the event, the rules it broke, and what the model would have allowed there. FILE may be gzipped.
Exit code 0: all accepted; 1: some rejected; 2: not a recording.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.recordings.recording import Event, Module, NotATraceError, Recording, read
from conformance.recordings.rules import RULES
from conformance.tla import tlc, value

CFG = """SPECIFICATION TSpec
CONSTANTS
  Reqs <- ReqSet
  Blocks <- BlockSet
  Ranks <- RankSet
  Prompts <- OnePrompt
  Depth = 1
  DeferFree = TRUE
  SyncLoads = {TRUE, FALSE}
  PartSteps = {FALSE}
  MaxPinned <- PinBudget
  MaxAttempts <- Retries
  MaxJob <- NumJobs
  MaxEpoch <- NumResets
"""
CONSTANTS = ("ranks", "blocks", "max_pinned", "max_attempts")
SAID = re.compile(r'^"(<<\\"(?:ACCEPTED|REJECTED)\\", .*>>)"\s*$', flags=re.MULTILINE)


@dataclass
class Verdict:
    """What TLC said about one recording. `at` counts events from 0, the header left out."""

    path: Path
    events: int
    accepted: bool
    at: int = 0
    event: Event = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    open_jobs: int = 0
    """Jobs that no rank's last report had settled when the recording ended."""

    def story(self) -> str:
        """For people."""
        if self.accepted:
            left = f", {self.open_jobs} jobs open at its end" if self.open_jobs else ""
            return f"accepted  {self.path.name}: {self.events} events{left}"
        shown = json.dumps(self.event)
        lines = [f"REJECTED  {self.path.name} at event {self.at} of {self.events}", f"  event    {shown[:600]}"]
        lines += [f"  broken   {rule}: {RULES.get(rule, '?')}" for rule in self.broken]
        lines += [f"  allowed  {text}" for text in self.allowed]
        return "\n".join(lines)


def check_all(paths: Sequence[Path], *, timeout_s: float = 600.0) -> list[Verdict]:
    """Recordings in the order given; one run of TLC for all whose engines had the same ranks, pool and budget.

    Raises:
        NotATraceError: see `read`.
        RuntimeError: TLC itself failed; its output is in the message.
    """
    groups: dict[tuple[int, ...], list[Recording]] = defaultdict(list)
    for recording in map(read, paths):
        groups[tuple(recording.header[k] for k in CONSTANTS)].append(recording)
    found = {verdict.path: verdict for group in groups.values() for verdict in _verdicts(group, timeout_s)}
    return [found[path] for path in paths]


def _verdicts(recordings: Sequence[Recording], timeout_s: float) -> list[Verdict]:
    module = Module(recordings)
    output = _tlc(module.text(), timeout_s)
    said = {}
    for line in SAID.findall(output):
        what, number, *rest = value.parse(line.replace('\\"', '"'))
        said[number] = (what, *rest)
    if sorted(said) != list(range(1, len(recordings) + 1)):
        raise RuntimeError(f"TLC gave {len(said)} verdicts on {len(recordings)} recordings:\n{output[-3000:]}")
    return [_verdict(recording, module, said[i]) for i, recording in enumerate(recordings, 1)]


def _verdict(recording: Recording, module: Module, said: tuple[Any, ...]) -> Verdict:
    count = len(recording.events)
    if said[0] == "ACCEPTED":
        return Verdict(recording.path, count, accepted=True, open_jobs=len(said[1]))
    _, line, broken, allowed = said
    event = recording.events[line - 1]
    told = tuple(_allowed(event, allowed, module))
    return Verdict(recording.path, count, False, line - 1, event, tuple(sorted(broken)), told)


def _allowed(event: Event, allowed: dict[str, Any], module: Module) -> Iterable[str]:
    """What the model would have taken instead of this event, in the recording's own names."""
    names = {n: name for name, n in module.requests.items()}
    hashes = {n: name for name, n in module.hashes.items()}
    for owed in allowed["owes"][:1]:
        what = ", ".join(sorted(hashes.get(x, str(x)) for x in owed["what"]))
        yield f"next must be {owed['a']} of job {owed['job']}: {what}"
        return
    reports = [f"job {j} rank {k - 1}" for j, k in sorted(allowed["reports"])]
    yield f"reports still to come: {', '.join(reports) or 'none'}"
    yield f"the next job is {allowed['nextJob']}, a new generation is above {allowed['lastGen']}"
    yield f"pinned blocks: {sorted(allowed['pinned'])}, room for {allowed['room']} more"
    if "req" in event:
        tracker = allowed["tracker"]
        retry = sorted(i - 1 for i in tracker["retry"])
        yield (
            f"request {names[module.requests[event['req']]]}: generation {tracker['gen'] or 'none'}, frontier "
            f"{tracker['front']}, to store again {retry}, load {tracker['load']}"
            + (", offered no hit (a load failed)" if allowed["nohit"] else "")
        )
    if event["action"] == "EmitStore":
        yield f"indices that may be stored: {sorted(i - 1 for i in allowed['due'])}"


def _tlc(data: str, timeout_s: float) -> str:
    with tempfile.TemporaryDirectory(prefix="kvledger-recording-") as folder:
        scratch = Path(folder)
        (scratch / "TraceData.tla").write_text(data, encoding="utf-8")
        output, code = tlc.launch(
            tlc.find("Trace.tla"), CFG, scratch, timeout_s=timeout_s, short=True, folders=(tlc.SPEC, scratch)
        )
    if code != 0:
        raise RuntimeError(f"TLC ended with {code}:\n{output[-3000:]}")
    return output


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev trace check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        verdicts = check_all(options.files)
    except NotATraceError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for verdict in verdicts:
        print(verdict.story())
    if options.json:
        told = ("events", "accepted", "at", "broken", "allowed")
        rows = [{"file": str(v.path)} | {key: getattr(v, key) for key in told} for v in verdicts]
        options.json.write_text(json.dumps({"traces": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(v.accepted for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
