"""What all tests share: markers that follow from the folder, and pytest's counts as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARKED_FOLDERS = ("e2e", "integration", "gpu")
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", type=Path, metavar="FILE", help="write the number of tests by outcome there")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for folder in MARKED_FOLDERS:
            if folder in item.path.relative_to(ROOT).parts[:-1]:
                item.add_marker(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if path := config.getoption("--json"):
        counts = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in OUTCOMES}
        path.write_text(json.dumps({"exit_code": int(exitstatus), **counts}, indent=2) + "\n")
