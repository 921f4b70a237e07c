"""The patches behind `twins`: each puts one bug into kvledger. Here they are by name; `scheduler_twins` and `rank_twins` hold
them by the side that has the bug.

They reach into kvledger's private names on purpose, and fail loudly when a name is gone.
"""

from conformance.refinement.twins.patching import Patch, named_patch, swap
from conformance.refinement.twins.ranks import RANK_PATCHES
from conformance.refinement.twins.scheduler import SCHEDULER_PATCHES

__all__ = ["PATCHES", "Patch", "named_patch", "swap"]

PATCHES: dict[str, Patch] = {**SCHEDULER_PATCHES, **RANK_PATCHES}
