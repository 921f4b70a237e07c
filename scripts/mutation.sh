#!/usr/bin/env bash
# Mutation testing of impl/kvledger/protocol: every small change of the code is noticed by a unit test, or explained in
# tests/mutation/survivors.toml. See docs/mutation.md.
# Usage: scripts/mutation.sh [--only GLOB] [--jobs N] [--json FILE]
# Needs: Python >= 3.11 and a package index. It has an environment of its own (.cache/mutation/venv), without vLLM.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly TOOLS=(mutmut==3.8.1 pytest==9.2.0 pytest-timeout==2.4.0)
readonly HOME_OF_IT="$ROOT/.cache/mutation"
readonly STAMP="$HOME_OF_IT/venv/.tools"

if [ "$(cat "$STAMP" 2>/dev/null)" != "${TOOLS[*]}" ]; then
    say "setting up mutmut (once, about 20 s)"
    mkdir -p "$HOME_OF_IT"
    python=$(find_python)
    "$python" -m venv "$HOME_OF_IT/venv"
    "$HOME_OF_IT/venv/bin/python" -m pip --disable-pip-version-check --no-input install -q "${TOOLS[@]}" ||
        fail "$EXIT_SETUP" "pip could not install ${TOOLS[*]}" "see above" "scripts/mutation.sh again"
    printf '%s\n' "${TOOLS[*]}" >"$STAMP"
fi
cd "$ROOT"
exec "$HOME_OF_IT/venv/bin/python" -m tests.mutation.run "$@"
