#!/usr/bin/env bash
# Everything that must hold: lint and types, the model, all tests, the tests once more under -O, the conformance suite, the demo.
# Usage: scripts/check.sh [pytest arguments]     (`./dev test`; with arguments only pytest runs)
# Needs: the environment of scripts/setup.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

python="$VENV/bin/python"
started=$SECONDS
stage() { say "== $(((SECONDS - started) / 60)) min: $*"; }

# Most of these tests wait for a store or a subprocess, so three at a time suit two cores.
parallel() { "$python" -m pytest -q -n 3 --dist loadscope "$@"; }

if (($# > 0)); then exec "$python" -m pytest "$@"; fi

# Beside the first stages, since later ones would have to wait for it: vLLM's bytecode for -O, which pip does not make
# (20 s in each process that does not find it), and the demo's model folders.
prepare() {
    env -u PYTHONDONTWRITEBYTECODE PYTHONOPTIMIZE=1 "$python" -c "
from vllm import LLM
import vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama" &&
        "$python" -m demo.model --tp 2
}
mkdir -p "$ROOT/.cache"
prepare >"$ROOT/.cache/prepare.log" 2>&1 &
preparing=$!
trap 'kill "$preparing" 2>/dev/null || true' EXIT

stage "lint, format, types"
"$ROOT/scripts/lint.sh"
stage "the model (TLC)"
"$python" -m conformance.model
wait "$preparing" || { cat "$ROOT/.cache/prepare.log" >&2 && exit 1; }
trap - EXIT
stage "unit, integration and conformance tests"
parallel -m "not e2e and not gpu" tests
stage "what runs in an engine, under PYTHONOPTIMIZE=1"
PYTHONOPTIMIZE=1 parallel -m "not e2e and not gpu" \
    tests/unit tests/tools tests/integration tests/conformance/test_kvledger.py tests/conformance/test_depth.py
stage "the main job, end to end"
# Two at a time, each with a thread per rank: an engine computes on one core, and starts on one.
"$python" -m pytest -q -n 2 --dist worksteal -m e2e tests/e2e
stage "done"
