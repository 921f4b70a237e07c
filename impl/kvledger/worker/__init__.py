"""The rank side: addresses, compute fence, staging, transfer threads. Imports without vLLM."""
