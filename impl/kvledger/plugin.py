"""`vllm.general_plugins` entry point: makes the connector known under its own name in every vLLM process."""

NAME = "MooncakeLedgerConnector"


def register() -> None:
    """Register the connector with vLLM's factory, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM offers no other question
        KVConnectorFactory.register_connector(NAME, "kvledger.connector", NAME)
