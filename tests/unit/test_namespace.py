"""The namespace is told at start, so that two engines that do not share can be compared."""

import logging
import re
from pathlib import Path

import pytest

from kvledger.config import load_settings
from kvledger.groups import plan_groups
from kvledger.namespace import build_keys
from tests.unit.identity.engines import engine_facts, make_model


def test_one_line_at_start_says_what_made_the_namespace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lines(version: str | None) -> tuple[str, dict[str, str]]:
        caplog.clear()
        settings = load_settings({"weights_version": version}, {})
        with caplog.at_level(logging.DEBUG, logger="kvledger.namespace"):
            engine_facts(
                make_model(tmp_path / "m"),
                change=lambda config, cache: build_keys(config, cache, plan_groups(config, cache), settings),
            )
        info, debug = (r for r in caplog.records if r.name == "kvledger.namespace")
        assert (info.levelno, debug.levelno) == (logging.INFO, logging.DEBUG)
        assert '"dtype": "torch.float32"' in debug.getMessage()
        return info.getMessage(), dict(re.findall(r"(\w+)=([0-9a-f]{8})\b", info.getMessage()))

    (one, facts), (other, others) = lines(None), lines("1")
    assert one.split()[:2] == ["kvledger:", "namespace"]
    assert one.split()[2] != other.split()[2]
    assert {"weights", "config", "dtype", "cache", "machine"} <= set(facts)
    assert [name for name in facts if facts[name] != others[name]] == ["weights"]
