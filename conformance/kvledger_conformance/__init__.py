"""A conformance suite for vLLM KV connectors that keep blocks in a Mooncake store.

Drives any `KVConnectorBase_V1` through vLLM's own scheduler, block pool and aggregator, in vLLM's hook order, against a
stand-in for Mooncake's Python client that copies real bytes and can be held, refused, broken or delayed at will.
"""

__version__ = "0.1.0"
