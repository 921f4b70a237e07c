"""No failure is swallowed in silence: every `except` of the product raises, logs or counts, or says here why it need not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvledger

PACKAGE = Path(kvledger.__file__).parent
TELLS = ("logger.", "self._faults.")

HONEST = {
    "config_values.py:_number_value OverflowError": "infinite: the bounds that follow refuse it",
    "config_values.py:_number_value ValueError": "the raise after it says it",
    "identity/model.py:_release importlib.metadata.PackageNotFoundError": "tries the next name",
    "identity/weights.py:_regions (ValueError, KeyError, TypeError, AttributeError, struct.error, zipfile.BadZipFile)": (
        "nothing is lost: the whole file counts"
    ),
    "mooncake/client.py:installed_distribution importlib.metadata.PackageNotFoundError": "tries the next name",
    "mooncake/client.py:_check_registry OSError": "gathered for the raise after it",
    "mooncake/client.py:master_answers OSError": "a question; its askers log a no",
    "mooncake/codes.py:describe ValueError": "the text says that the code is unknown",
    "mooncake/daemon.py:_Daemon._accept_all BlockingIOError": "nobody left to accept",
    "mooncake/daemon.py:_Daemon._read_lease BlockingIOError": "nothing to read: the lease goes on",
    "mooncake/daemon.py:_Daemon._read_lease OSError": "the end of a lease, logged below",
    "mooncake/daemon.py:_Daemon._welcome OSError": "the engine is gone before it had its lease",
    "mooncake/daemon.py:_end_master subprocess.TimeoutExpired": "the master is killed then",
    "mooncake/daemon.py:try_lock BlockingIOError": "a question; the asker waits",
    "mooncake/embedded.py:_at_end (BlockingIOError, TimeoutError)": "a question: the connection is still there",
    "mooncake/embedded.py:_at_end OSError": "a question: the connection is gone",
    "mooncake/embedded.py:_join (FileNotFoundError, ConnectionRefusedError)": "no daemon runs: one is started",
    "mooncake/embedded.py:_read_info ConnectionResetError": "the daemon is about to end: one is started",
    "mooncake/embedded.py:_start_error OSError": "there is no log to quote; the error says so",
    "mooncake/selftest.py:_Attempt.run Exception": "kept for `self_test`, which raises it",
    "mooncake/selftest.py:_Attempt.run StoreError": "kept for `self_test`, which raises it",
    "observe/faults.py:_name ValueError": "the kind is named by its number",
    "scheduler/lookup.py:LookupService._loop BaseException": "`_die` counts and logs it",
    "worker/lanes.py:Lane._loop BaseException": "the rank side's `_lost` counts and logs it",
    "worker/transfer.py:Transfer.run GivenUpError": "counted by the rank side, which gave the job up",
    "worker/transfer.py:Transfer.run StoreCallError": "counted where it was raised",
}
"""File, function and exception of the others, and why nobody needs to hear of it."""


def handlers(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every handler with the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            yield inside, node
        name = f"{inside}.{node.name}".lstrip(".") if isinstance(node, ast.FunctionDef | ast.ClassDef) else inside
        yield from handlers(node, name)


def tells(handler: ast.ExceptHandler) -> bool:
    """Whether it raises, logs, or counts."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(TELLS):
            return True
    return False


def silent(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(PACKAGE).as_posix()
    return {
        f"{name}:{where} {ast.unparse(h.type) if h.type else ''}".strip() for where, h in handlers(tree) if not tells(h)
    }


def test_every_handler_raises_logs_or_counts_or_has_a_reason_here():
    found = {one for path in PACKAGE.rglob("*.py") for one in silent(path)}
    assert found - set(HONEST) == set(), "raise, log or count there; or say here why nobody needs to hear of it"
    assert set(HONEST) - found == set(), "no longer there"


def test_exceptions_are_suppressed_only_where_processes_and_sockets_are_cleaned_up():
    users = {p.name for p in PACKAGE.rglob("*.py") if "suppress(" in p.read_text(encoding="utf-8")}
    assert users == {"daemon.py", "embedded.py"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", False),
        ("return None", False),
        ("x = str(e)", False),
        ("raise", True),
        ("logger.info('x')", True),
        ("self._faults.raised('put', e)", True),
    ],
)
def test_the_check_tells_silence_from_speech(body, said):
    tree = ast.parse(f"def f(self):\n    try:\n        g()\n    except Exception as e:\n        {body}\n")
    assert [tells(handler) for _, handler in handlers(tree)] == [said]
