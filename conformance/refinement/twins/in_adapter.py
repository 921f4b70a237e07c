"""By mutant of the model: the patch with which its counterexample goes through on kvledger, driven by the adapter."""

from conformance.refinement.twins.patches import PATCHES, TOLD
from conformance.refinement.twins.patching import Patch

LEDGER_PATCHES: dict[str, Patch] = {
    mutant: PATCHES[patch]
    for mutant, patch in ({name: name for name in TOLD["replayed"]["own"]} | TOLD["replayed"]["by"]).items()
}
OUT_OF_REACH: dict[str, str] = {
    mutant: reason["why"] for reason in TOLD["out_of_reach"] for mutant in reason["mutants"]
}
"""Mutants whose counterexample cannot be replayed at this level, and why."""
