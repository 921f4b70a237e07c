#!/usr/bin/env bash
# Lint, format check, type check, shell and Dockerfile check.
# Usage: scripts/lint.sh [--fix]     (`./dev lint`)
# Needs: the `test` extra in .venv (`./dev setup`).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"

if [ "${1:-}" = --fix ]; then
    ruff check --fix --quiet .
    ruff format --quiet .
fi
say "ruff (lint)" && ruff check --quiet .
say "ruff (format)" && ruff format --check --quiet .
say "mypy" && mypy --no-error-summary
say "generated parts of the docs" && "$VENV/bin/python" scripts/generated.py
say "shellcheck" && shellcheck --external-sources --source-path=SCRIPTDIR dev .ci/run scripts/*.sh
say "hadolint" && hadolint --failure-threshold info Dockerfile
