"""kvledger as a target of the suite, with the model's predicates evaluated on its own state after every action."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from conformance.refinement import predicates
from kvledger_conformance.suite import targets


def find(name: str) -> targets.Target:
    """A target that is kvledger, checked for `refines-the-model`, too.

    Raises:
        ValueError: see `kvledger_conformance.suite.targets.find`.
    """
    return dataclasses.replace(targets.find(name), refine=predicates.check)


def with_predicates() -> AbstractContextManager[Any]:
    """Meanwhile the built-in targets that are kvledger are those of `find`."""
    ours = {name: find(name) for name, target in targets.BUILT_IN.items() if target.module == targets.KVLEDGER.module}
    return mock.patch.dict(targets.BUILT_IN, ours)
