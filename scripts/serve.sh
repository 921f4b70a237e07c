#!/usr/bin/env bash
# `vllm serve` with kvledger. Without a store address, kvledger starts a store on this host and finds it again later.
# Usage: scripts/serve.sh MODEL [vllm serve arguments]     (`./dev serve`, and the image's entry point)
# Needs: vLLM and kvledger in the environment on PATH.
set -euo pipefail

: "${1:?usage: scripts/serve.sh MODEL [vllm serve arguments]}"
exec vllm serve "$@" --kv-transfer-config '{"kv_connector": "MooncakeLedgerConnector", "kv_role": "kv_both"}'
