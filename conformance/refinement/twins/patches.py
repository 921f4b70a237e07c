"""The patches behind the suite's twins, by name, and what `twins.toml` says of them and of the model's mutants."""

import tomllib
from pathlib import Path

from conformance.refinement.twins.patching import Patch
from conformance.refinement.twins.ranks import RANK_PATCHES
from conformance.refinement.twins.scheduler import SCHEDULER_PATCHES

PATCHES: dict[str, Patch] = SCHEDULER_PATCHES | RANK_PATCHES
TOLD = tomllib.loads(Path(__file__).with_name("twins.toml").read_text(encoding="utf-8"))
