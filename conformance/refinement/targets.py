"""kvledger as a target of the suite, with the model's predicates evaluated on its own objects after every action."""

import dataclasses

from conformance.refinement import predicates
from kvledger_conformance.suite import targets


def add_predicates() -> None:
    """Every built-in target that is kvledger checks `refines-the-model`, too."""
    for name, target in targets.BUILT_IN.items():
        if target.module.startswith(targets.KVLEDGER.module):
            targets.BUILT_IN[name] = dataclasses.replace(target, refine=predicates.check)
