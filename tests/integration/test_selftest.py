"""The start-up self-test against real stores: one that works, and one to which nobody gives memory."""

from collections.abc import Iterator

import pytest

from kvledger.config import load_settings
from kvledger.mooncake import daemon, selftest
from kvledger.mooncake.client import MooncakeClient
from kvledger.mooncake.embedded import list_keys
from kvledger.mooncake.selftest import self_test


def connect(address: str, segment_bytes: int = 0) -> MooncakeClient:
    settings = load_settings({}, {}).attached_to(address)
    return MooncakeClient.connect(settings, segment_bytes=segment_bytes, buffer_bytes=0, name="selftest")


def test_a_store_that_works_passes_and_keeps_nothing(store, keys):
    client = connect(store.master_address)
    self_test(client, keys)
    self_test(client, keys)
    client.close(5.0)
    assert not [key for key in list_keys(store.metrics_port) if selftest.MARK in key]


@pytest.fixture
def bare_master() -> Iterator[str]:
    """The address of a master without any memory owner."""
    master, rpc_port, _ = daemon._start_master()
    yield f"127.0.0.1:{rpc_port}"
    daemon._end_master(master)


def test_a_store_without_any_memory_is_told_with_the_remedy(bare_master, keys, monkeypatch, caplog):
    """Mooncake answers it as it answers for a full store, which must not keep an engine from starting."""
    monkeypatch.setattr(selftest, "RETRY_FOR_S", 1.0)
    client = connect(bare_master)
    self_test(client, keys)
    client.close(5.0)
    assert "start a memory owner, or set global_segment_size" in caplog.text
