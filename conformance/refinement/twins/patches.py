"""The patches behind the suite's twins, by name; they stand by the side of kvledger that has the bug."""

from conformance.refinement.twins.patching import Patch
from conformance.refinement.twins.ranks import RANK_PATCHES
from conformance.refinement.twins.scheduler import SCHEDULER_PATCHES

PATCHES: dict[str, Patch] = SCHEDULER_PATCHES | RANK_PATCHES
