#!/usr/bin/env bash
# Downloads an official tla2tools.jar release and refuses it unless its checksum is the expected one.
# Usage: scripts/fetch-tlatools.sh VERSION SHA256 TARGET
# Needs: curl, sha256sum.
set -euo pipefail

readonly version=${1:?usage: scripts/fetch-tlatools.sh VERSION SHA256 TARGET}
readonly checksum=${2:?give the SHA-256 of tla2tools.jar: docker build --build-arg TLA2TOOLS_SHA256=…}
readonly target=${3:?usage: scripts/fetch-tlatools.sh VERSION SHA256 TARGET}

curl --fail --silent --show-error --location --output "$target" \
    "https://github.com/tlaplus/tlaplus/releases/download/v$version/tla2tools.jar"
echo "$checksum  $target" | sha256sum --check --quiet
