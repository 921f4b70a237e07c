"""The two connectors, configured alike: the same store, the same file of Mooncake's settings, each one's own defaults."""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.harness import IN_TREE, KVLEDGER

NO_STORE = "127.0.0.1:1"
"""An address for engines that never ask the store."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector class by name."""

    module: str
    class_name: str


CONNECTORS = {
    IN_TREE: Connector(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector", "MooncakeStoreConnector"
    ),
    KVLEDGER: Connector("kvledger.connector", "MooncakeLedgerConnector"),
}


def extra_config(side: str, **common: Any) -> dict[str, Any]:
    """`kv_connector_extra_config`: what both are given, and a port of its own for each in-tree engine."""
    own = {"lookup_rpc_port": next(_numbers)} if side == IN_TREE else {}
    return {**own, **common}


def store_environment(folder: str | os.PathLike[str], address: str) -> dict[str, str]:
    """Environment in which both connectors use the store at `address`; its memory belongs to another process."""
    path = Path(folder, "mooncake.json")
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": address,
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "64MB",
            }
        )
    )
    return {
        "MOONCAKE_CONFIG_PATH": str(path),
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def on_store(address: str = NO_STORE) -> Iterator[None]:
    """Connectors made in this process inside the block use the store at `address`."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, store_environment(folder, address)),
    ):
        yield


def close_scheduler_side(connector: Any) -> None:
    """Close a scheduler-side connector of either kind, with what the in-tree one leaves open: its lookup socket.

    A socket that is left open keeps the interpreter in ZeroMQ as soon as the collector finds its context.
    """
    connector.shutdown()
    scheduler = getattr(connector, "connector_scheduler", None)
    if scheduler is not None:
        scheduler.client.executor.shutdown(wait=True, cancel_futures=True)
        scheduler.client.socket.close(linger=0)
        scheduler.client.ctx.term()
