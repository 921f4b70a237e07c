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

stage "lint, format, types"
"$ROOT/scripts/lint.sh"
stage "the model (TLC)"
"$python" spec/run.py
stage "unit, integration and conformance tests"
parallel -m "not e2e and not gpu" tests
stage "what runs in an engine, under PYTHONOPTIMIZE=1"
PYTHONOPTIMIZE=1 parallel -m "not e2e and not gpu" \
    tests/unit tests/integration tests/conformance/test_kvledger.py tests/conformance/test_depth.py
stage "the main job, end to end"
"$python" -m pytest -m e2e tests
stage "done"
