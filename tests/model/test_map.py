"""The map action ↔ function ↔ hook in spec/map.toml is true in both directions."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC, CODE = ROOT / "spec", ROOT / "impl" / "kvledger"
MAP: dict[str, Any] = tomllib.loads((SPEC / "map.toml").read_text(encoding="utf-8"))
ENTRIES: list[dict[str, Any]] = MAP["action"]
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
PROTOCOL = {"Ledger": "protocol/ledger.py", "RankLedger": "protocol/rank.py"}


def spec_actions() -> set[str]:
    """Actions of the model: every name in Next and its parts."""
    text = (SPEC / "MooncakeStore.tla").read_text(encoding="utf-8")
    tail = text[text.index("\nSchedulerNext ==") : text.index("\nSpec ==")]
    parts = {"SchedulerNext", "EnvironmentNext", "RankNext", "DmaNext", "Next", "Refusals", "Max"}
    return {
        name for name in re.findall(r"\b([A-Z]\w+)(?=\(| |\n)", tail) if re.search(rf"^{name}(\(| ==)", text, re.M)
    } - parts


def definitions(file: str) -> set[str]:
    """Operators that a module defines."""
    return set(re.findall(r"^([A-Z]\w+)(?:\([^)]*\))? ==", (SPEC / file).read_text(encoding="utf-8"), re.M))


def functions(file: Path) -> dict[str, str]:
    """Docstrings by `Class.method` and function name of a Python file, read without importing it."""
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef):
            methods = (f for f in node.body if isinstance(f, ast.FunctionDef))
            found |= {f"{node.name}.{f.name}": ast.get_docstring(f) or "" for f in methods}
    return found


@pytest.fixture(scope="module")
def vllm() -> Path:
    """Where vLLM's sources are; it is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Path(spec.submodule_search_locations[0])


def test_every_action_is_mapped_once() -> None:
    mapped = [e["spec"] for e in ENTRIES if not e.get("decision")]
    assert sorted(mapped) == sorted(set(mapped))
    assert set(mapped) == spec_actions()


def test_every_action_has_a_banner_in_the_model() -> None:
    text = (SPEC / "MooncakeStore.tla").read_text(encoding="utf-8")
    banners = " ".join(re.findall(r"^\(\* ACTION  (.*)", text, re.M))
    missing = [a for a in spec_actions() if not re.search(rf"\b{a}\b", banners)]
    assert not missing


def test_decisions_exist_in_the_model() -> None:
    assert {e["spec"] for e in ENTRIES if e.get("decision")} <= definitions("MooncakeStoreLedger.tla")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e["spec"])
def test_the_functions_that_decide_name_the_action(entry: dict[str, Any]) -> None:
    """So `grep` leads from the model to the code in one step."""
    for named in entry["code"]:
        file, _, function = named.partition(":")
        assert re.search(rf"`{entry['spec']}`", functions(CODE / file)[function]), named


def test_what_banners_say_of_the_code_exists(vllm: Path) -> None:
    """`module.function` in a CODE line is one of ours; other names with an underscore are vLLM's."""
    banners = re.findall(r"CODE +((?:.|\n {10,})*)", (SPEC / "MooncakeStore.tla").read_text(encoding="utf-8"))
    ours = {f"{p.stem}.{name.split('.')[-1]}" for p in CODE.rglob("*.py") for name in functions(p)}
    named = {n for banner in banners for n in re.findall(r"\b[a-z]+\.[a-z]\w+", banner)}
    assert len(named) >= 10
    assert named <= ours
    places = ("v1/core/sched/scheduler.py", "v1/core/kv_cache_manager.py", BASE, "v1/outputs.py")
    text = "".join((vllm / place).read_text(encoding="utf-8") for place in places)
    theirs = {n for banner in banners for n in re.findall(r"(?<![.\[\w])_?[a-z]+(?:_[a-z]+)+(?![/\w])", banner)}
    assert len(theirs) >= 10
    assert sorted(n for n in theirs if not re.search(rf"\b{n}\b", text)) == []


@pytest.mark.parametrize("cls", PROTOCOL)
def test_every_protocol_function_is_mapped_or_excused(cls: str) -> None:
    file = PROTOCOL[cls]
    public = {f for f in functions(CODE / file) if f.startswith(f"{cls}.") and not f.split(".")[1].startswith("_")}
    mapped = {c.split(":")[1] for e in ENTRIES for c in e["code"] if c.startswith(f"{file}:") and "._" not in c}
    excused = {f for f in MAP["excused"] if f.startswith(f"{cls}.")}
    assert not mapped & excused
    assert public == mapped | excused


def test_hooks_exist_in_vllm(vllm: Path) -> None:
    hooks = {f.split(".")[1] for f in functions(vllm / BASE) if f.startswith(("KVConnectorBase_V1.", "SupportsHMA."))}
    assert {h for e in ENTRIES for h in e["hook"]} <= hooks


def test_the_readme_names_every_action_and_property() -> None:
    readme = (SPEC / "README.md").read_text(encoding="utf-8")
    properties = definitions("MooncakeStoreProps.tla") - {"Shared", "Unsettled"}
    missing = {n for n in spec_actions() | properties if f"`{n}" not in readme}
    assert not missing
