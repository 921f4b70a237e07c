"""Tests of the tie are as quiet about scripted faults as those of the suite."""

from tests.conformance.conftest import quiet  # noqa: F401 - a fixture
