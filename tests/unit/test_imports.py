"""The ground floors stand without vLLM, the protocol without anything, and imports point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvledger

PACKAGE = Path(kvledger.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_IN_PROTOCOL = {"time", "threading", "torch", "vllm", "mooncake"}

BLOCK_AND_IMPORT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocked())
importlib.import_module(sys.argv[1])
assert "vllm" not in sys.modules
"""


@pytest.mark.parametrize(
    "module", ["kvledger.protocol", "kvledger.worker", "kvledger.mooncake", "kvledger.config", "kvledger.keys"]
)
def test_imports_where_vllm_is_not(module: str) -> None:
    submodules = sorted((PACKAGE / module.removeprefix("kvledger.").replace(".", "/")).glob("*.py"))
    names = [module] + [f"{module}.{path.stem}" for path in submodules if path.stem != "__init__"]
    for name in names:
        run = subprocess.run(
            [sys.executable, "-c", BLOCK_AND_IMPORT, name], check=False, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{name}: {run.stderr}"


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sorted((PACKAGE / "protocol").glob("*.py")), ids=lambda path: path.name)
def test_protocol_knows_no_clock_thread_tensor_engine_or_store(path: Path) -> None:
    names = imported_names(ast.parse(path.read_text(encoding="utf-8")))
    assert not {name for name in names if name.split(".")[0] in FORBIDDEN_IN_PROTOCOL}
    above = {name for name in names if name.startswith("kvledger")} - {"kvledger.errors"}
    assert all(name.startswith("kvledger.protocol") for name in above), "a floor stands only on what is below it"


def modules() -> dict[str, set[str]]:
    """Every module of ours, with those of ours that it imports at its top."""
    files = {}
    for base in (PACKAGE.parent, ROOT / "conformance", ROOT):
        for path in base.rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            if parts[0] in HOUSES[base == ROOT] and (base != ROOT or parts[1] != "kvledger_conformance"):
                files[".".join(parts).removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        found[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name] |= {w if w in files else node.module for w in wanted if node.module in files or w in files}
    return found


HOUSES = {False: ("kvledger", "kvledger_conformance"), True: ("conformance", "demo", "bench")}


def cycles(graph: dict[str, set[str]]) -> set[str]:
    """Modules that are left when those that import nothing that is left are taken away, again and again."""
    left = dict(graph)
    while free := [m for m, uses in left.items() if not uses & left.keys()]:
        for module in free:
            del left[module]
    return set(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {m: {u for u in uses if not m.startswith(f"{u}.")} for m, uses in modules().items()}  # not its own package
    assert len(graph) > 100
    assert cycles(graph) == set()
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("house", "never"),
    [
        ("kvledger.scheduler", "kvledger.worker"),
        ("kvledger.worker", "kvledger.scheduler"),
        ("kvledger", "kvledger_conformance"),
        ("kvledger", "demo"),
        ("kvledger_conformance", "conformance"),
        ("kvledger_conformance.engine", "kvledger_conformance.store.standin"),
        ("conformance.tla", "conformance.refinement"),
        ("demo", "conformance"),
    ],
)
def test_arrows_point_one_way(house: str, never: str) -> None:
    graph = modules()
    wrong = [
        f"{m} -> {u}"
        for m, uses in graph.items()
        if f"{m}.".startswith(f"{house}.")
        for u in uses
        if f"{u}.".startswith(f"{never}.")
    ]
    assert wrong == []


def test_the_check_sees_a_forbidden_import() -> None:
    """The negative control."""
    assert imported_names(ast.parse("def f():\n    from time import monotonic")) & FORBIDDEN_IN_PROTOCOL
    run = subprocess.run([sys.executable, "-c", BLOCK_AND_IMPORT, "vllm"], check=False, capture_output=True, text=True)
    assert run.returncode != 0
    assert "must not be imported here" in run.stderr
