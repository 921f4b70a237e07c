"""What vLLM is told at start-up and kvledger about vLLM's configuration, and where kvledger's log lines go."""

import copy
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import kvledger.connector
from kvledger.assembly import Parts
from kvledger.connector import MooncakeLedgerConnector
from kvledger.errors import ConfigError
from kvledger.plugin import share_vllm_logging
from kvledger_conformance.engine.compat import Shape, make_config


@contextmanager
def bare_loggers():
    """kvledger's and vLLM's logger as in a process that has configured nothing."""
    ours, theirs = logging.getLogger("kvledger"), logging.getLogger("vllm")
    kept = [(logger, list(logger.handlers), logger.level) for logger in (ours, theirs, logging.getLogger())]
    for logger, _, _ in kept:
        logger.handlers, logger.level = [], logging.NOTSET
    try:
        yield ours, theirs
    finally:
        for logger, handlers, level in kept:
            logger.handlers, logger.level = handlers, level


def test_lines_appear_where_those_of_vllm_do(caplog):
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(caplog.handler)
        theirs.setLevel(logging.INFO)
        share_vllm_logging()
        share_vllm_logging()
        logging.getLogger("kvledger.connector").info("seen once")
        assert caplog.messages == ["seen once"]
        assert ours.propagate


def test_a_logger_that_the_user_configured_stays_as_it_is():
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(logging.NullHandler())
        ours.setLevel(logging.ERROR)
        share_vllm_logging()
        assert ours.handlers == []
        assert ours.level == logging.ERROR


def test_lines_that_the_root_logger_shows_are_not_shown_twice():
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(logging.NullHandler())
        logging.getLogger().addHandler(logging.NullHandler())
        share_vllm_logging()
        assert ours.handlers == []


def test_entry_point_registers_the_class_under_its_own_name():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvledger import plugin

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert found.__name__ == plugin.NAME


class Ranked(MooncakeLedgerConnector):
    """kvledger without a store."""

    parts = Parts(connect_store=lambda *_, **__: SimpleNamespace(close=lambda *_: None))


CACHE = KVCacheConfig(
    num_blocks=15,
    kv_cache_tensors=[],
    kv_cache_groups=[
        KVCacheGroupSpec(["layer0"], FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32))
    ],
)


def multi_connector(monkeypatch, **fields) -> MultiConnector:
    """vLLM's real MultiConnector with kvledger as its child, built as a worker builds it; `fields` of the outer
    KVTransferConfig."""
    monkeypatch.setattr(kvledger.connector, "get_tensor_model_parallel_rank", lambda: 1)  # rank 0 tests its store
    child = {
        "kv_connector": "Ranked",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master_server_address": "127.0.0.1:1", **fields.pop("extra", {})},
    }
    config = copy.copy(make_config(Shape(), "MultiConnector", None, {}))
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]},
        **fields,
    )
    with set_current_vllm_config(config):
        return MultiConnector(config, KVConnectorRole.WORKER, CACHE)


def test_a_child_of_multi_connector_is_refused_where_a_lost_key_would_end_its_request(monkeypatch):
    """Core reads the outer policy, whatever the child's own says; the default is to fail."""
    with pytest.raises(ConfigError, match="kv_load_failure_policy = 'fail'") as refusal:
        multi_connector(monkeypatch)
    assert refusal.value.source == "the configuration of MultiConnector"
    assert '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"' in refusal.value.remedy


def test_a_child_of_multi_connector_starts_where_core_recomputes_or_the_child_never_loads(monkeypatch):
    for fields in ({"kv_load_failure_policy": "recompute"}, {"extra": {"enable_lookup": False}}):
        built = multi_connector(monkeypatch, **fields)
        assert isinstance(built.sub_connectors[0], Ranked)
        built.shutdown()


def test_direct_transfers_of_device_memory_are_refused_when_the_caches_are_registered(monkeypatch):
    """With the wheel that the tests run with, which cannot address a device; `meta` stands for one."""
    direct = {"transfer_mode": "direct", "enable_lookup": False}
    (child,) = multi_connector(monkeypatch, extra=direct).sub_connectors
    with pytest.raises(ConfigError, match=r"mooncake-transfer-engine-non-cuda .* cannot address meta memory"):
        child.register_kv_caches({"layer0": torch.zeros(15, 4, 8, device="meta")})
