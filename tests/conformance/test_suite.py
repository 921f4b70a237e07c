"""The suite's own parts: shrinking, replay, reports, the command line, determinism."""

import dataclasses
import json

import pytest

from conformance.refinement.twins.patches import PATCHES
from kvledger_conformance import __main__ as cli
from kvledger_conformance.engine import compat
from kvledger_conformance.suite import report, runner, shrinking, targets
from kvledger_conformance.suite.driver import Script, driving, replay
from kvledger_conformance.suite.properties import Impossible
from kvledger_conformance.suite.scenarios import SCENARIOS

LONG: Script = [
    {"do": "add", "name": "y", "blocks": "b", "tail": 2, "tokens": 3},
    {"do": "steps", "count": 5},
    {"do": "hold", "rank": 0, "operation": "put"},
    {"do": "add", "name": "x", "blocks": "abc", "tail": 3, "tokens": 9},
    {"do": "step", "pace": "early"},
    {"do": "preempt"},
    {"do": "until_preempted"},
    {"do": "forget"},
    {"do": "steps", "count": 4},
]


@pytest.fixture
def no_pins():
    with PATCHES["no-pins"]():
        yield dataclasses.replace(targets.find("kvledger-direct"), refine=None)


def test_shrunk_script_is_shorter_and_breaks_the_same(no_pins):
    script, violation = shrinking.shrink(no_pins, compat.Shape(), LONG, "blocks-held-during-dma", budget_s=20)
    assert violation.name == "blocks-held-during-dma"
    assert len(script) <= 5
    again = replay(no_pins, compat.Shape(), script)
    assert again is not None
    assert again.what == violation.what


def test_story_names_blocks_and_calls(no_pins):
    violation = replay(no_pins, compat.Shape(), LONG)
    assert violation is not None
    assert "put #" in violation.story
    assert "blocks [" in violation.story
    assert "=> blocks-held-during-dma" in violation.story


def test_runs_are_functions_of_their_scripts():
    stories = []
    for _ in range(3):
        with driving(targets.find("kvledger"), compat.Shape(ranks=2)) as driver:
            driver.run([*LONG, {"do": "finish"}])
            stories.append(sorted(driver.story().splitlines()))
    assert stories[0] == stories[1] == stories[2]


def test_action_that_does_not_exist_is_refused_and_not_recorded():
    with driving(targets.find("kvledger"), compat.Shape()) as driver:
        with pytest.raises(Impossible):
            driver.do("step")
        assert driver.script == []


def test_report_of_a_broken_connector(no_pins, tmp_path):
    result = runner.run(no_pins, "dev", chosen=())
    page = report.markdown(result)
    assert "| `blocks-held-during-dma` | **broken** |" in page
    report.write_json(result, tmp_path / "result.json")
    stored = json.loads((tmp_path / "result.json").read_text())
    assert {"property", "steps", "story"} <= set(stored["violations"][0])


def test_replay_file(no_pins, tmp_path, capsys):
    file = tmp_path / "finding.json"
    file.write_text(json.dumps({"target": "kvledger-direct", "shape": {}, "past": [], "script": LONG}))
    assert cli.main(["replay", str(file)]) == cli.EXIT_BROKEN
    assert "=> blocks-held-during-dma" in capsys.readouterr().out


def test_class_by_name_runs():
    target = targets.replace(
        targets.find("kvledger.connector:MooncakeLedgerConnector"),
        lambda address: {"master_server_address": address, "mode": "standalone-store", "staging_bytes": "64KiB",
                         "max_batch_bytes": "4KiB"},
    )  # fmt: skip
    assert replay(target, compat.Shape(), SCENARIOS[0].script[:3]) is None
