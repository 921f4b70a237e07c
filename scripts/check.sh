#!/usr/bin/env bash
# Everything that must hold: lint, types, unit tests once more under -O, then the whole suite.
# Usage: scripts/check.sh [pytest arguments]     (`./dev test`; with arguments only pytest runs)
# Needs: the environment of scripts/setup.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

if (($# == 0)); then
    "$ROOT/scripts/lint.sh"
    say "unit tests under PYTHONOPTIMIZE=1"
    PYTHONOPTIMIZE=1 "$VENV/bin/python" -m pytest -q -m "not e2e and not integration and not gpu" tests
    say "the whole suite"
fi
exec "$VENV/bin/python" -m pytest "$@"
