"""The scheduler-process side: vLLM objects → protocol, lookups, save planning."""
