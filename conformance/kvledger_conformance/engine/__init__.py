"""An engine without a model: vLLM's own scheduler and block pool around any connector."""
