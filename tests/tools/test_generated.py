"""The generated parts of docs/ are what the code says, and a part that is not is seen."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.protocol import LOAD_LIFE, RANK_LIFE, Life, Load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generated() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "generated.py")))


def test_the_pages_are_up_to_date(generated: SimpleNamespace) -> None:
    for page, _, _ in generated.PARTS:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert generated.renewed(page, text) == text


@pytest.mark.parametrize(("old", "new"), [("QUEUED --> RUNNING", "QUEUED --> REPORTED"), ("RankDrop", "RankFinish")])
def test_a_diagram_that_says_something_else_is_renewed(generated: SimpleNamespace, old: str, new: str) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    before, begin, after = text.partition("<!-- RANK_LIFE: begin -->")
    assert generated.renewed("protocol.md", before + begin + after.replace(old, new, 1)) == text


@pytest.mark.parametrize(("first", "table"), [(Life.QUEUED, RANK_LIFE), (Load.NONE, LOAD_LIFE)])
def test_a_diagram_has_each_step_of_its_table_and_no_other(
    generated: SimpleNamespace, first: Life | Load, table: Any
) -> None:
    steps = set()
    for line in generated.life_diagram(first, table).splitlines():
        arrow, _, actions = line.strip().partition(": ")
        old, _, new = arrow.partition(" --> ")
        steps |= {((old, action), new) for action in actions.split(", ") if action}
    assert steps == {((old.name, action), new.name) for (old, action), new in table.items()}


def test_a_page_without_its_markers_is_refused(generated: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"docs/settings\.md: the markers"):
        generated.renewed("settings.md", "# Settings\n")
