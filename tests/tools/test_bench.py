"""The harness of the benchmarks: what a ratio and its spread are, what the result file holds, and that a measure really runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import plots, report
from bench.harness import IN_TREE, KVLEDGER, RAW, Curve, Findings, Measure, Row, Samples, alternating

ROOT = Path(__file__).resolve().parent.parent.parent


def measured(row: Row, in_tree: list[float], kvledger: list[float], raw: float | None = None) -> Measure:
    samples = Samples(row)
    for side, values in ((IN_TREE, in_tree), (KVLEDGER, kvledger), (RAW, [] if raw is None else [raw])):
        for value in values:
            samples.add(side, value)
    return samples.measure()


def bench(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "impl", "conformance"))
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_a_ratio_is_of_medians_and_its_spread_of_single_repetitions() -> None:
    found = measured(Row("cost", "ms"), [4.0, 6.0, 90.0], [2.0, 1.0, 3.0])
    assert (found.in_tree, found.kvledger, found.ratio, found.spread) == (6.0, 2.0, 3.0, (2.0, 30.0))
    assert found.repetitions == 3


def test_above_one_kvledger_is_better_whichever_way_is_better() -> None:
    assert measured(Row("cost", "ms"), [4.0], [2.0]).ratio == 2.0
    assert measured(Row("goodput", "GB/s", better="higher"), [2.0], [4.0]).ratio == 2.0


def test_there_is_no_ratio_without_both_figures() -> None:
    alone = measured(Row("cost", "ms", wanted="ratio ≥ 2"), [], [2.0])
    assert (alone.in_tree, alone.ratio, alone.spread, alone.holds()) == (None, None, None, None)
    assert measured(Row("cost", "ms"), [1.0], [0.0]).ratio is None


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        ("ratio ≥ 2", True),
        ("ratio ≥ 2.1", False),
        ("kvledger ≤ 2", True),
        ("kvledger ≤ 1.05", False),
        ("kvledger/raw ≥ 0.5", True),
        ("kvledger/raw ≥ 0.9", False),
        ("ratio ≥ 2, kvledger/raw ≥ 0.5", True),
        ("ratio ≥ 2, kvledger/raw ≥ 0.9", False),
        ("", None),
    ],
)
def test_what_was_wanted_is_compared_with_what_was_found(wanted: str, holds: bool | None) -> None:
    assert measured(Row("cost", "ms", wanted=wanted), [4.0], [2.0], raw=4.0).holds() is holds


def test_a_wanted_value_that_nothing_can_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="twice as good"):
        Row("cost", "ms", wanted="twice as good")


def test_each_side_goes_first_in_every_other_repetition() -> None:
    assert [order[0] for order in alternating(4)] == [IN_TREE, KVLEDGER, IN_TREE, KVLEDGER]
    assert all(sorted(order) == sorted((IN_TREE, KVLEDGER)) for order in alternating(4))


def test_the_result_file_has_what_its_readers_look_for(tmp_path: Path) -> None:
    curve = Curve(name="c", x_name="x", y_name="y", x=[1.0, 2.0], series={IN_TREE: [1.0, 2.0], KVLEDGER: [1.0, 1.0]})
    found = Findings([measured(Row("cost", "ms"), [4.0], [2.0])], [curve], report.configuration(["x"], quick=True))
    file = tmp_path / "result.json"
    report.write_json(file, found)
    (line,) = json.loads(file.read_text())["measures"]
    assert {"name", "unit", "in_tree", "kvledger", "ratio", "spread"} <= set(line)
    assert report.read_json(file) == found


def test_a_result_file_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"format": 0}')
    with pytest.raises(ValueError, match="format 0"):
        report.read_json(file)


def test_the_table_shows_both_figures_the_ratio_and_what_was_wanted() -> None:
    row = Row("cost", "ms", wanted="ratio ≥ 3")
    assert report.table([measured(row, [4.0, 4.0], [2.0, 1.0])]).splitlines()[-1] == (
        "| cost, ms | 4 | 1.5 | 2.67 (2–4) | – | ratio ≥ 3 | no |"
    )


def test_a_plot_is_the_same_file_when_drawn_again(tmp_path: Path) -> None:
    curve = Curve(
        name="c", x_name="x", y_name="y", x=[1.0, 2.0], series={KVLEDGER: [1.0, 3.0], RAW: [2.0, 2.0]}, log_x=True
    )
    plots.write(curve, tmp_path / "a.svg")
    plots.write(curve, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "kvledger" in (tmp_path / "a.svg").read_text()


def test_an_unknown_benchmark_is_refused_with_the_names_there_are() -> None:
    run = bench("nonsense")
    assert run.returncode == 2
    assert "unknown benchmark 'nonsense'" in run.stderr
    assert "decode_steps" in run.stderr


def test_a_measure_runs_with_both_connectors(tmp_path: Path) -> None:
    run = bench("burst", "--quick", "--results", str(tmp_path), timeout_s=240)
    assert run.returncode == 0, run.stderr
    values = json.loads((tmp_path / "result.json").read_text())
    assert values["configuration"]["quick"] is True
    assert len(values["measures"]) == 10
    assert all(m["in_tree"] > 0 and m["kvledger"] > 0 and m["ratio"] > 0 for m in values["measures"])
    assert (tmp_path / "result.md").read_text() == run.stdout
