"""`./dev` as a person meets it: help with an example for each verb, errors with cause and hint, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
VERBS = re.findall(r"^  (\w+) ", (ROOT / "dev").read_text().split("<<'TEXT'")[1].split("\nTEXT")[0], re.MULTILINE)


def dev(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "dev"), *arguments], check=False, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_overview_names_every_verb_and_is_the_default() -> None:
    assert dev().stdout == dev("help").stdout == dev("--help").stdout
    assert {"setup", "demo", "test", "serve", "spec", "lint", "help"} <= set(VERBS)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "help"])
def test_help_has_an_example_and_needs_no_environment(verb: str, tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages: what a new machine has
    bare.chmod(0o755)
    run = dev(verb, "--help", KVLEDGER_DEV_VENV=str(tmp_path / "none"), PYTHON=str(bare))
    assert (run.returncode, run.stderr) == (0, "")
    assert "example" in run.stdout
    assert f"./dev {verb} " in run.stdout
    assert not (tmp_path / "none").exists()
    assert dev("help", verb, PYTHON=str(bare)).stdout == run.stdout


def test_unknown_verb() -> None:
    run = dev("dance")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == (
        "error: ./dev has no verb dance\n"
        "  cause: verbs: demo test serve spec prove bench conformance trace lint setup help\n"
        "\n"
        "hint: ./dev help\n"
    )


def test_unknown_serve_argument() -> None:
    run = dev("serve", "--modle", "x")
    assert (run.returncode, run.stderr.partition("\n  cause: ")[0]) == (2, "error: ./dev serve does not know --modle")


def test_no_python(tmp_path: Path) -> None:
    """A machine without a fitting Python is told so, not left with a traceback."""
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    run = dev("demo", "--help", PATH=str(tmp_path), PYTHON="")
    assert (run.returncode, run.stderr.partition("\n  cause: ")[0]) == (4, "error: no Python 3.11 or newer")
    assert "\n\nhint: " in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--connector", "nonsense"], "MODULE:CLASS"),
        (["--store-delay", "-1"], "number of milliseconds"),
        (["--tp", "0"], "at least one rank"),
        (["--transfer-mode", "pigeon"], "invalid choice"),
    ],
)
def test_demo_refuses_what_it_cannot_do(arguments: list[str], message: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "demo", *arguments], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert message in run.stderr


def test_readme_names_every_verb() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS if f"./dev {verb}" not in readme and verb != "help"] == []


def test_index_of_torch_reaches_setup_and_the_suite() -> None:
    """One default for all that `./dev` starts; the environment's word goes first."""
    for before, index in (("unset TORCH_INDEX", "https://download.pytorch.org/whl/cpu"), ("export TORCH_INDEX=x", "x")):
        started = ["bash", "-euc", f"{before}; . scripts/lib.sh; exec printenv TORCH_INDEX"]
        assert subprocess.check_output(started, cwd=ROOT, text=True).strip() == index
    named = [p.name for p in (ROOT / "scripts").iterdir() if p.is_file() and "download.pytorch" in p.read_text()]
    assert named == ["lib.sh"]


def test_scripts_say_what_they_do() -> None:
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        head = path.read_text().splitlines()[:6]
        assert head[1].startswith("# "), path
        assert path.name == "lib.sh" or any(line.startswith("# Usage: ") for line in head), path
