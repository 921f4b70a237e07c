"""The end of both sides fits into the grace that vLLM gives a process."""

import pytest

from kvledger.shutdown import GRACE_VARIABLE, shutdown_budget_s


@pytest.mark.parametrize(
    ("grace", "setting", "budget"),
    [
        (None, 10.0, 2.0),
        (None, 0.5, 0.5),
        ("5", 10.0, 2.0),
        ("30", 10.0, 10.0),
        ("1", 10.0, 0.2),
        ("0", 10.0, 0.2),
        ("no number", 10.0, 2.0),
    ],
)
def test_a_side_waits_as_long_as_the_setting_says_or_its_share_of_the_grace(monkeypatch, grace, setting, budget):
    monkeypatch.delenv(GRACE_VARIABLE, raising=False)
    if grace is not None:
        monkeypatch.setenv(GRACE_VARIABLE, grace)
    assert shutdown_budget_s(setting) == budget


def test_the_grace_is_vllms(monkeypatch):
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.delenv(GRACE_VARIABLE, raising=False)
    assert 2 * shutdown_budget_s(1000.0) < envs.environment_variables[GRACE_VARIABLE]()
