"""kvledger warns of every scripted fault; tests of the suite are quiet about it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """kvledger warns of every scripted fault."""
    logger = logging.getLogger("kvledger")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
