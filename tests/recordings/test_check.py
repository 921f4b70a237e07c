"""Trace validation: recordings of real engines are accepted by TLC; each corruption is rejected, at its event, by the named rule.

`conformance/recordings/` holds recordings made by `./dev trace run DIR --all`: real vLLM, real Mooncake (docs/traces.md).
"""

import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest

from conformance.recordings import check, recorded, recording, rules
from conformance.recordings.scenarios import by_name
from tests.recordings.corruptions import CORRUPTIONS, Events

ROOT = Path(__file__).resolve().parent.parent.parent
TRACES = ROOT / "conformance" / "recordings" / "accepted"

RECORDINGS = sorted(path.name.removesuffix(".jsonl.gz") for path in TRACES.glob("*.jsonl.gz"))
AFTER = 3  # events that a corrupted recording keeps after the corruption: it must be rejected before them


def load(name: str) -> Events:
    found = recording.read(TRACES / f"{name}.jsonl.gz")
    return [found.header, *found.events]


def save(path: Path, events: Events) -> Path:
    path.write_text("".join(json.dumps(e | {"seq": seq}) + "\n" for seq, e in enumerate(events)))
    return path


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory):
    """Verdicts on a recording and on all of its corruptions, from one run of TLC."""

    @cache
    def of(name: str) -> dict[str, tuple[check.Verdict, int]]:
        folder = tmp_path_factory.mktemp(name)
        files, at = [TRACES / f"{name}.jsonl.gz"], {"": 0}
        for one in CORRUPTIONS:
            if one.recording == name:
                events = load(name)
                at[one.name] = one.corrupt(events)
                files.append(save(folder / f"{one.name}.jsonl", events[: at[one.name] + 1 + AFTER]))
        return dict(zip(at, zip(check.check_all(files), at.values(), strict=True), strict=True))

    return of


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_run_is_accepted(verdicts, name):
    verdict, _ = verdicts(name)[""]
    assert verdict.accepted, verdict.story()
    assert verdict.events >= 200
    assert verdict.open_jobs == 0


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording_contains_what_its_scenario_promises(name):
    """What only the workload can count (aborts by phase, how a reset ended) is checked when the recording is made."""
    seen = recorded.facts(load(name))
    counted = [m for m in by_name(name).must if not m.startswith(("aborted_", "resets_", "given_up"))]
    assert [m for m in counted if not seen[m]] == []


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda c: f"{c.recording}-{c.name}")
def test_corrupted_recording_is_rejected_at_its_event(verdicts, corruption):
    verdict, at = verdicts(corruption.recording)[corruption.name]
    assert not verdict.accepted
    assert verdict.at == at - 1, verdict.story()  # the header is not an event
    assert corruption.rule in verdict.broken, verdict.story()
    assert verdict.event["action"] in verdict.story()
    assert rules.RULES[corruption.rule] in verdict.story()
    assert verdict.allowed


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param("early-release", "PinnedNotFreed", id="a connector that gives its block references back at once"),
        pytest.param("failed-loads-before-fix", "RequestIsAdmitted", id="kvledger before trace validation found a bug"),
    ],
)
def test_engine_with_a_wrong_connector_is_rejected(name, rule):
    """Not corrupted: recorded from real engines whose connector did what it must not."""
    (verdict,) = check.check_all([TRACES.parent / "rejected" / f"{name}.jsonl.gz"])
    assert not verdict.accepted
    assert verdict.broken == (rule,)


def test_a_rejection_says_what_was_allowed(verdicts):
    told = verdicts("storm-tp2")["forget_a_release"][0].allowed
    assert re.fullmatch(r"next must be Release of job \d+: [\d, ]+", told[0])
    told = verdicts("storm-tp2")["report_twice"][0].allowed
    assert re.fullmatch(r"reports still to come: job \d+ rank [01].*", told[0])


def test_every_rule_is_explained_and_broken_by_a_corruption():
    text = (ROOT / "spec" / "Trace.tla").read_text()
    section = text.split("(* The rules of each event. *)")[1].split("(* The effects. *)")[0]
    named = set(re.findall(r"^\s*\[?([A-Z]\w+) \|->|\[([A-Z]\w+) \|->|, ([A-Z]\w+) \|->", section, re.MULTILINE))
    written = {name for names in named for name in names if name}
    assert written == set(rules.RULES) == {c.rule for c in CORRUPTIONS}


def test_lost_line_is_noticed(tmp_path):
    path = tmp_path / "gap.jsonl"
    lines = gzip.decompress((TRACES / "storm-tp2.jsonl.gz").read_bytes()).decode().splitlines()
    path.write_text("\n".join([*lines[:10], *lines[11:]]))
    with pytest.raises(recording.NotATraceError, match="gap"):
        check.check_all([path])


def test_recording_of_another_version_is_refused(tmp_path):
    events = load("storm-tp2")
    events[0]["version"] = 1
    with pytest.raises(recording.NotATraceError, match="version"):
        check.check_all([save(tmp_path / "old.jsonl", events)])
