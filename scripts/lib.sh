# shellcheck shell=bash
# What the scripts share: messages, exit codes, finding Python. Sourced, never run.

# shellcheck disable=SC2034  # used by the scripts that source this
readonly EXIT_USAGE=2 EXIT_SETUP=3 EXIT_MISSING=4

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly VENV="${KVLEDGER_DEV_VENV:-$ROOT/.venv}"

# Where CPU builds of torch are, if pip's own index has none. Setting up reads it, and so does the conformance suite for
# its environments per vLLM release.
export TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
readonly TORCH_INDEX

say() { printf '%s\n' "$*" >&2; }

# fail CODE ERROR CAUSE HINT
fail() {
    printf 'error: %s\n  cause: %s\n\nhint: %s\n' "$2" "$3" "$4" >&2
    exit "$1"
}

# Prints a Python of at least 3.11: $PYTHON, or the first that fits.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "$EXIT_MISSING" "no Python 3.11 or newer" "tried ${PYTHON:-} python3 python3.13 python3.12 python3.11" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3 ./dev …"
}
