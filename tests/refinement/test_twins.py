"""Every historic bug, put into kvledger, is found; every mutant of the model has a twin or a reason."""

import tomllib
from pathlib import Path

import pytest

from conformance.refinement.twins import table as twins

REGISTRY = Path(__file__).resolve().parents[2] / "spec" / "mutants" / "registry.toml"


@pytest.mark.parametrize("twin", twins.TWINS, ids=lambda t: t.id)
def test_twin_is_killed(twin):
    row = twins.kill(twin)
    assert row["killed"], row


def test_every_mutant_of_the_model_has_a_twin_or_a_reason():
    with REGISTRY.open("rb") as file:
        mutants = {m["id"] for m in tomllib.load(file)["mutant"]}
    covered = {m for twin in twins.TWINS for m in twin.mutant} | set(twins.NOT_TWINNED)
    assert mutants - covered == set()
    assert covered - mutants == set()
