"""The main job on real parts: real vLLM, a real model, a real Mooncake store, as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BOUND_S = 900
# Two of these tests run side by side on two cores: more threads would wait for each other's cores most of the time.
ONE_THREAD_PER_RANK = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SLOW_STORE_MS = "1000"
LONGEST_STEP_S = 30.0  # far above a step of the model, far below a wait without bound


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The engine without connector need not serve the same prompts again for each test, nor for each test process."""
    own = tmp_path_factory.getbasetemp()
    return (own if worker_id == "master" else own.parent) / "references"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Where the engines of one test record their protocol events."""
    return tmp_path / "traces"


def run_demo(folder: Path, references: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, figures and all output of one quick run."""
    figures = folder / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "demo", "--quick", "--json", str(figures), "--reference", str(references), *arguments],
        check=False,
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD_PER_RANK, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
    )
    values = json.loads(figures.read_text()) if figures.exists() else {}
    return run.returncode, values, run.stdout


def assert_all_holds(code: int, values: dict[str, Any], output: str) -> None:
    """What every good run must show, whatever its options."""
    assert values, output
    assert values["faults"] == [], output
    assert code == 0, output
    assert output.endswith("\nall of it holds\n"), output
    assert values["outputs_equal"] is True
    assert values["objects_audited"] > 0
    assert values["objects_poisoned"] == 0
    assert values["blocks_pinned_at_end"] == 0
    assert values["blocks_pinned_max"] > 0
    assert values["hit_tokens"] > 0
    assert values["preemptions"] > 0
    assert values["store_jobs"]["done"] > 0
    assert values["load_jobs"]["done"] > 0
    assert values["ttft_cold_s"] > 0
    assert values["ttft_warm_s"] > 0


def assert_behaviours_of_the_model(traces: Path, engines: int) -> None:
    """TLC on what the engines of a run recorded: the model says what this code does, on real parts."""
    recordings = sorted(traces.glob("*.jsonl"))
    assert len(recordings) == engines
    check = [sys.executable, "-m", "conformance.recordings.check", *map(str, recordings)]
    run = subprocess.run(check, check=False, capture_output=True, text=True, timeout=BOUND_S)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("accepted") == engines


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        pytest.param(["--tp", "2"], {}, id="two-ranks"),  # first, since it takes longest
        pytest.param(["--store-delay", "50"], {}, id="slow-store"),
        pytest.param(["--load-sync"], {"PYTHONOPTIMIZE": "1"}, id="synchronous-loads-under-O"),
        pytest.param([], {}, id="one-rank"),
    ],
)
def test_main_job(
    arguments: list[str], environment: dict[str, str], tmp_path: Path, references: Path, traces: Path
) -> None:
    assert_all_holds(*run_demo(tmp_path, references, "--trace", str(traces), *arguments, **environment))
    assert_behaviours_of_the_model(traces, engines=2)  # cold and warm


@pytest.mark.timeout(BOUND_S)
def test_killed_master_costs_hits_and_nothing_else(tmp_path: Path, references: Path, traces: Path) -> None:
    code, values, output = run_demo(tmp_path, references, "--trace", str(traces), "--kill-master")
    assert values, output
    assert values["faults"] == [], output
    assert code == 0, output
    assert values["store_killed"] is True
    assert values["outputs_equal"] is True
    assert values["requests_failed"] == 0
    assert values["blocks_pinned_at_end"] == 0
    assert values["engines_idle"] is True
    assert values["longest_step_s"] < LONGEST_STEP_S
    assert_behaviours_of_the_model(traces, engines=1)


@pytest.mark.timeout(BOUND_S)
def test_the_audit_sees_pins_released_early(tmp_path: Path, references: Path) -> None:
    """The negative control: the same job on a connector that lets go of its pins at once must fail the audit.

    The store is slow enough for blocks to be reused before they are read; the good connector is right with it, too."""
    slow = ["--cold-only", "--store-delay", SLOW_STORE_MS]
    _, values, output = run_demo(tmp_path, references, *slow)
    assert values, output
    assert [fault for fault in values["faults"] if "no preemption" not in fault] == [], output  # pins make vLLM wait
    assert values["objects_audited"] > 0

    twin = "tests.twins.early_release:EarlyReleaseConnector"
    code, values, output = run_demo(tmp_path, references, *slow, "--connector", twin)
    assert values, output
    assert values["objects_poisoned"] > 0, output
    assert code == 1, output
