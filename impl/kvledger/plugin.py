"""`vllm.general_plugins` entry point: makes the connector known under its own name in every vLLM process."""

import logging

NAME = "MooncakeLedgerConnector"


def register() -> None:
    """Register the connector with vLLM's factory, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM offers no other question
        KVConnectorFactory.register_connector(NAME, "kvledger.connector", NAME)


def share_vllm_logging() -> None:
    """Let kvledger's log lines appear where vLLM's do, unless the user has configured logging for them.

    vLLM puts its handler on the logger `vllm` and none on the root, so other packages' INFO lines are lost.
    """
    ours, theirs = logging.getLogger("kvledger"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
