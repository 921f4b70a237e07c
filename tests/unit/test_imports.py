"""The ground floors stand without vLLM, and the protocol without anything: see "The house" in docs/protocol.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvledger

PACKAGE = Path(kvledger.__file__).parent
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


def test_the_check_sees_a_forbidden_import() -> None:
    """The negative control."""
    assert imported_names(ast.parse("def f():\n    from time import monotonic")) & FORBIDDEN_IN_PROTOCOL
    run = subprocess.run([sys.executable, "-c", BLOCK_AND_IMPORT, "vllm"], check=False, capture_output=True, text=True)
    assert run.returncode != 0
    assert "must not be imported here" in run.stderr
