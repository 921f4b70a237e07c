"""Trace validation: a recorded run is accepted by TLC; each corruption of it is rejected, at its event, by the named rule.

`tests/traces/storm.jsonl` was recorded from two ranks behind a slow store, with preemptions, a failed put and loads.
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "spec" / "trace"))

import check  # noqa: E402 - the script under test

GOOD = ROOT / "tests" / "traces" / "storm.jsonl"
Events = list[dict[str, Any]]


def load() -> Events:
    return [json.loads(line) for line in GOOD.read_text().splitlines()]


def first(events: Events, action: str, **wanted: Any) -> int:
    return next(
        i for i, e in enumerate(events) if e["action"] == action and all(e.get(k) == v for k, v in wanted.items())
    )


def first_store(events: Events) -> int:
    return next(i for i, e in enumerate(events) if e["action"] == "EmitStore" and e["job"] is not None)


def report_twice(events: Events) -> int:
    i = first(events, "ApplyReport")
    events.insert(i + 1, copy.deepcopy(events[i]))
    return i + 1


def report_of_unknown_job(events: Events) -> int:
    i = first(events, "ApplyReport")
    events[i]["job"] = 1000
    return i


def release_before_every_rank_reported(events: Events) -> int:
    i = first(events, "ApplyReport")
    blocks = next(e["blocks"] for e in events if e["action"] == "EmitStore" and e["job"] == events[i]["job"])
    events.insert(i + 1, {"action": "Release", "job": events[i]["job"], "blocks": blocks})
    return i + 1


def forget_a_release(events: Events) -> int:
    i = first(events, "Release")
    del events[i]
    return i


def release_other_blocks(events: Events) -> int:
    i = first(events, "Release")
    events[i]["blocks"] = [*events[i]["blocks"][:-1], 12]
    return i


def repeat_a_job_id(events: Events) -> int:
    stores = [i for i, e in enumerate(events) if e["action"] == "EmitStore" and e["job"] is not None]
    events[stores[1]]["job"] = events[stores[0]]["job"]
    return stores[1]


def store_under_another_name(events: Events) -> int:
    i = first_store(events)
    events[i]["names"] = ["0" * 16, *events[i]["names"][1:]]
    return i


def reuse_a_pinned_block(events: Events) -> int:
    """Another request's table holds a block that an open job still reads: what #52360 looks like from outside."""
    i, j = next(
        (i, j)
        for i, e in enumerate(events)
        if e["action"] == "EmitStore" and e["job"] is not None
        for j in range(i + 1, first(events, "Release", job=e["job"]))
        if events[j]["action"] == "EmitStore" and events[j]["table"]
    )
    events[j]["table"][-1] = events[i]["blocks"][0]
    events[j]["hashes"][-1] = "f" * 16
    return j


def repeat_a_generation(events: Events) -> int:
    begins = [i for i, e in enumerate(events) if e["action"] == "BeginGeneration"]
    events[begins[1]]["gen"] = events[begins[0]]["gen"]
    return begins[1]


def store_for_an_ended_generation(events: Events) -> int:
    i = first_store(events)
    events[i]["gen"] += 50
    return i


def skip_a_block(events: Events) -> int:
    i = first_store(events)
    events[i]["blocks"], events[i]["names"] = events[i]["blocks"][1:], events[i]["names"][1:]
    return i


def retry_what_did_not_fail(events: Events) -> int:
    i = next(k for k, e in enumerate(events) if e["action"] == "ApplyReport" and e["result"] == "DONE" and "retry" in e)
    events[i]["retry"] = [*events[i]["retry"], 7]
    return i


CORRUPTIONS: list[tuple[Callable[[Events], int], str]] = [
    (report_twice, "FirstReportOfThisRank"),
    (report_of_unknown_job, "JobIsLive"),
    (release_before_every_rank_reported, "OwedByThisJob"),
    (forget_a_release, "ReleaseFirst"),
    (release_other_blocks, "TheBlocksPinned"),
    (repeat_a_job_id, "JobIdIsNext"),
    (store_under_another_name, "NamesBelongToBlocks"),
    (reuse_a_pinned_block, "PinnedNotFreed"),
    (repeat_a_generation, "GenerationIsNew"),
    (store_for_an_ended_generation, "GenerationIsCurrent"),
    (skip_a_block, "NothingSkipped"),
    (retry_what_did_not_fail, "OldGenerationHarmless"),
]


def test_recorded_run_is_accepted():
    verdict = check.check(GOOD)
    assert verdict.accepted
    assert verdict.events >= 100


@pytest.mark.parametrize(("corrupt", "rule"), CORRUPTIONS, ids=[c.__name__ for c, _ in CORRUPTIONS])
def test_corrupted_recording_is_rejected_at_its_event(tmp_path, corrupt, rule):
    events = load()
    at = corrupt(events)
    for seq, event in enumerate(events):
        event["seq"] = seq
    path = tmp_path / "corrupted.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in events))

    verdict = check.check(path)

    assert not verdict.accepted
    assert verdict.at == at - 1  # the header is not an event
    assert rule in verdict.broken
    assert verdict.event["action"] in verdict.story()


def test_lost_line_is_noticed(tmp_path):
    path = tmp_path / "gap.jsonl"
    lines = GOOD.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], *lines[11:]]))
    with pytest.raises(check.NotATraceError, match="gap"):
        check.check(path)
