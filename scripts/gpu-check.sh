#!/usr/bin/env bash
# The checks that need a CUDA device, as one short run. Needs Python with torch (CUDA), pytest and Mooncake; not vLLM.
# Usage: scripts/gpu-check.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "no CUDA device is visible to torch")'
exec env PYTHONPATH="impl${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -q --timeout 120 \
    tests/gpu tests/unit/worker/test_layout.py tests/integration/test_rank_side.py "$@"
