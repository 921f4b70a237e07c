"""Adapters by content: names of blocks change with what lies behind an adapter's name and path."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvledger.groups import GroupPlan
from kvledger.identity.adapters import Adapters
from kvledger.scheduler.names import BlockNames
from tests.unit.identity.engines import make_adapter

HASHES = [bytes([i]) * 32 for i in range(8)]
PLAN = GroupPlan(
    block_size=4, hashes_per_block=1, layer_names=("l",), num_blocks=9, num_ranks=1, max_blocks_per_request=8
)


def names(adapters: Adapters, lora: LoRARequest | None, plan: GroupPlan = PLAN) -> Sequence[bytes] | None:
    request = SimpleNamespace(block_hashes=HASHES, lora_request=lora)
    return BlockNames(plan, adapters).of(request)


def lora(folder: Path, name: str = "style", **fields: Any) -> LoRARequest:
    return LoRARequest(name, 1, str(folder), **fields)


def named_by_a_new_engine(folder: Path, **fields: Any) -> list[bytes]:
    found = names(Adapters(), lora(folder, **fields))
    assert found is not None
    return list(found)


def test_without_an_adapter_the_names_are_the_block_hashes() -> None:
    assert names(Adapters(), None) is HASHES


@pytest.mark.parametrize("change", [{"scale": 1.5}, {"alpha": 32}], ids=["weights", "scaling"])
def test_same_name_and_path_other_adapter(change: dict[str, Any], tmp_path: Path) -> None:
    before = named_by_a_new_engine(make_adapter(tmp_path / "a"))
    assert not set(before) & set(named_by_a_new_engine(make_adapter(tmp_path / "a", **change)))
    assert not set(before) & set(HASHES)


def test_the_form_in_which_an_adapter_is_read_counts(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    assert named_by_a_new_engine(folder) != named_by_a_new_engine(folder, is_3d_lora_weight=True)


def test_same_bytes_written_again_are_the_same_adapter(tmp_path: Path) -> None:
    """Other times and inodes, another base model's path in its configuration: as on another host."""
    before = named_by_a_new_engine(make_adapter(tmp_path / "a", base="/models/m"))
    os.rename(tmp_path / "a", tmp_path / "old")
    assert named_by_a_new_engine(make_adapter(tmp_path / "a", base="/mnt/m")) == before


def test_an_adapter_that_changes_under_a_running_engine_is_shared_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, folder = Adapters(), make_adapter(tmp_path / "a")
    assert names(adapters, lora(folder)) is not None
    make_adapter(folder, scale=1.5)
    with caplog.at_level(logging.WARNING):
        assert names(adapters, lora(folder)) is None
        make_adapter(folder)
        assert names(adapters, lora(folder)) is None, "which of the two a block was computed with is not known any more"
    (line,) = caplog.messages
    assert "its files changed; restart the engine" in line
    assert names(adapters, None) is HASHES


def test_an_adapter_that_is_not_here_is_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert names(Adapters(), LoRARequest("style", 1, "org/adapter")) is None
    assert "give its path instead of a name" in caplog.text


def test_names_are_sliced_and_counted_per_block(tmp_path: Path) -> None:
    two = GroupPlan(
        block_size=4, hashes_per_block=2, layer_names=("l",), num_blocks=9, num_ranks=1, max_blocks_per_request=8
    )
    folder = make_adapter(tmp_path / "a")
    every, halves = names(Adapters(), lora(folder)), names(Adapters(), lora(folder), two)
    assert every is not None
    assert halves is not None
    assert (len(every), len(halves)) == (8, 4)
    assert every[2:4] == [every[2], every[3]]
    assert list(halves) == list(every)[1::2]
