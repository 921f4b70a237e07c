"""The conformance package is imported from its folder when it is not installed."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[2] / "conformance")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """kvledger warns of every scripted fault."""
    logger = logging.getLogger("kvledger")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
