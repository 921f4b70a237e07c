"""docs/protocol.md is complete to the model and to the code: actions, lives, fields and variables under their names."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from kvledger.protocol import Job, Life, Load, Report, Result, Tracker

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def rows(heading: str) -> str:
    """The first cells of a section's tables."""
    section = re.split(r"^#+ ", PAGE[PAGE.index(f"{heading}\n") + len(heading) :], flags=re.MULTILINE)[0]
    return " ".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))


def test_every_action_with_code_has_a_row() -> None:
    entries = tomllib.loads((ROOT / "spec" / "map.toml").read_text(encoding="utf-8"))["action"]
    with_code = {e["spec"] for e in entries if e["code"]}
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    inside_others = {"Pins", "WithinBudget"}  # in the row of EmitStore, which they are parts of
    assert {a for a in with_code - inside_others if f"`{a}`" not in first_cells} == set()
    assert {a for a in inside_others if f"`{a}`" not in PAGE and f"`{a}:" not in PAGE} == set()


@pytest.mark.parametrize("value", [*Life, *Load, *Result], ids=str)
def test_every_life_and_result_is_explained(value: Life | Load | Result) -> None:
    assert re.search(rf"`(?:\w+\.)?{value.name}`", PAGE)


@pytest.mark.parametrize("cls", [Job, Report, Tracker])
def test_every_field_is_named(cls: type) -> None:
    line = next(part for part in PAGE.splitlines() if part.startswith((f"| `{cls.__name__}` |", f"`{cls.__name__}` (")))
    assert [f.name for f in dataclasses.fields(cls) if f"`{f.name}`" not in line] == []


def test_every_variable_of_the_model_is_in_the_dictionary() -> None:
    text = (ROOT / "spec" / "MooncakeStoreTypes.tla").read_text(encoding="utf-8")
    block = re.sub(r"\\\*.*", "", text[text.index("\nVARIABLES\n") : text.index("\ncoreVars ==")])
    variables = set(re.findall(r"\w+", block)) - {"VARIABLES"}
    assert {"trk", "led", "nohit", "store"} <= variables
    assert {v for v in variables if f"`{v}`" not in rows("## The dictionary")} == set()
