"""The demo's judges: each of them can say no."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import report
from demo.audit import Expected, Findings, audit, relative_error
from demo.plan import Plan
from demo.prompts import conversations

VALUES = np.linspace(-2.0, 2.0, 64, dtype=np.float32)
HASH = "ab" * 32
KEY = f"kvl1@0123456789abcdef@r0@g0@{HASH}"


@pytest.fixture
def expected(tmp_path: Path) -> Expected:
    (tmp_path / "kv_rank0.bin").write_bytes((VALUES * 7).tobytes() + VALUES.tobytes())
    return Expected(tmp_path, {"slots": {"cd" * 32: 0, HASH: 1}, "record_bytes": [VALUES.nbytes]})


def look(expected: Expected, data: bytes, key: str = KEY) -> Findings:
    return audit([key], lambda _: data, expected, "float32")


def test_last_bits_may_differ(expected: Expected) -> None:
    findings = look(expected, (VALUES * np.float32(1 + 1e-6)).tobytes())
    assert (findings.poisoned, findings.bit_identical) == (0, 0)
    assert 0 < findings.max_error < 1e-5


@pytest.mark.parametrize("prefix", ["kvl1@ns", "kvl1@team@a@ns", "kvl1@ns.epoch"])
def test_right_object_whatever_its_key_begins_with(expected: Expected, prefix: str) -> None:
    findings = look(expected, VALUES.tobytes(), f"{prefix}@r0@g0@{HASH}")
    assert (findings.audited, findings.poisoned, findings.bit_identical, findings.max_error) == (1, 0, 1, 0.0)


@pytest.mark.parametrize(
    ("data", "key", "fault"),
    [
        pytest.param((VALUES[::-1]).tobytes(), KEY, "wrong bytes", id="another block's bytes"),
        pytest.param((VALUES * 1.01).tobytes(), KEY, "wrong bytes", id="one percent off"),
        pytest.param(np.full_like(VALUES, np.nan).tobytes(), KEY, "wrong bytes", id="not numbers"),
        pytest.param(bytes(VALUES.nbytes), KEY, "wrong bytes", id="zeros"),
        pytest.param(VALUES.tobytes()[:-4], KEY, "wrong size", id="short"),
        pytest.param(VALUES.tobytes() * 2, KEY, "wrong size", id="long"),
        pytest.param(b"", KEY, "unreadable", id="gone"),
        pytest.param(VALUES.tobytes(), KEY.replace("ab", "ba"), "unknown key", id="hash of no request"),
        pytest.param(VALUES.tobytes(), KEY.replace("@r0", "@r1"), "unknown key", id="rank that does not exist"),
        pytest.param(VALUES.tobytes(), "something else", "unknown key", id="foreign key"),
    ],
)
def test_poisoned_object(expected: Expected, data: bytes, key: str, fault: str) -> None:
    findings = look(expected, data, key)
    assert (findings.wrong, findings.poisoned) == ({fault: 1}, 1)
    assert key in findings.examples[0]


def test_bfloat16_is_compared_as_numbers() -> None:
    one, next_one = np.array([0x3F80], np.uint16), np.array([0x3F81], np.uint16)  # 1 and 1 + 2**-7
    assert relative_error(next_one.tobytes(), one.tobytes(), "bfloat16") == pytest.approx(2**-7)


def engine_run(**changes: Any) -> dict[str, Any]:
    snapshot = {"blocks_pinned": 0, "blocks_pinned_max": 3, "store_jobs": {"done": 2}, "load_jobs": {"done": 1}}
    run = {
        "prompts": [[1, 2]], "tokens": [[3]], "finish_reasons": ["length"], "hit_tokens": 32, "preemptions": 1,
        "ttft_s": 0.5, "idle": True, "idle_after_s": 0.0, "longest_step_s": 0.1, "snapshot": snapshot,
    }  # fmt: skip
    return run | changes


def verdict(poisoned: int = 0, audited: int = 4, **changes: Any) -> dict[str, Any]:
    findings = Findings(audited=audited, wrong={"wrong bytes": poisoned})
    runs = {"reference": engine_run(), "cold": engine_run(preemptions=0), "warm": engine_run(**changes)}
    return report.summarize(Plan(model="m"), runs, findings.as_dict())


def test_good_run_has_no_fault() -> None:
    values = verdict()
    assert values["faults"] == []
    assert values["ok"] is True
    assert values["store_jobs"] == {"done": 4}
    assert "4 / 0" in report.table(values)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokens": [[4]]}, "outputs differ"),
        ({"finish_reasons": ["error"]}, "did not finish"),
        ({"idle": False}, "idle"),
        ({"hit_tokens": 0}, "served from the store"),
        ({"preemptions": 0}, "no preemption"),
        ({"snapshot": engine_run()["snapshot"] | {"blocks_pinned": 1}}, "still pinned"),
        ({"poisoned": 1}, "wrong bytes"),
        ({"audited": 0}, "no object"),
    ],
)
def test_each_fault_is_seen(changes: dict[str, Any], word: str) -> None:
    values = verdict(**changes)
    assert values["ok"] is False
    assert any(word in fault for fault in values["faults"]), values["faults"]
    assert report.table(values)


def test_of_a_dead_store_neither_hits_nor_audit_are_asked() -> None:
    runs = {"reference": engine_run(), "cold": engine_run(hit_tokens=0)}
    values = report.summarize(Plan(model="m", kill_master=True), runs, None)
    assert values["faults"] == []
    assert "the store is gone" in report.table(values)


def test_prompts_are_distinct_and_share_prefixes() -> None:
    chats = conversations(24)
    users = [chat[1]["content"] for chat in chats]
    assert len(set(users)) == len(users) == 24
    assert len({chat[0]["content"] for chat in chats}) == 1
    documents = [user.split("\n\nQuestion: ")[0] for user in users if "\n\nQuestion: " in user]
    assert len(set(documents)) < len(documents)
    with pytest.raises(ValueError, match="between 1 and 48"):
        conversations(49)
