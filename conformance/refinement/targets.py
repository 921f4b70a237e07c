"""kvledger as a target of the suite, with the model's predicates evaluated on its own state after every action."""

import dataclasses

from conformance.refinement import predicates
from kvledger_conformance.suite import targets


def find(name: str) -> targets.Target:
    """A target that is kvledger, checked for `refines-the-model`, too.

    Raises:
        ValueError: see `kvledger_conformance.suite.targets.find`.
    """
    return dataclasses.replace(targets.find(name), refine=predicates.check)


def add_predicates() -> None:
    """From now on the built-in targets that are kvledger are those of `find`."""
    for name, target in targets.BUILT_IN.items():
        if target.module == targets.KVLEDGER.module:
            targets.BUILT_IN[name] = find(name)
