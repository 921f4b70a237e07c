"""kvledger: a Mooncake store connector for vLLM whose lifecycle is a TLA+ model first."""

__version__ = "0.1.0"
