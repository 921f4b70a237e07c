"""kvledger under vLLM's own scheduler, followed on the model's graph."""

import pytest

from conformance.refinement import hook_walk, tour
from conformance.refinement.twins.patches import PATCHES
from conformance.tla import graph

BOUNDS = tour.bounds(hook_walk.SLICE)


@pytest.fixture(scope="module")
def slice_graph() -> graph.Graph:
    return hook_walk.exported()


def test_what_is_observed_is_a_path_of_the_model(slice_graph):
    assert graph.lint(slice_graph) == []
    result = hook_walk.walk(slice_graph, BOUNDS, runs=80)
    assert result.failure == ""
    assert result.points > 2000
    assert len(result.seen) >= 100
    assert len(result.taken) >= 200
    assert [action for action, (taken, _, _) in result.by_action.items() if not taken] == []
    assert all(taken <= possible <= total for taken, possible, total in result.by_action.values())


@pytest.mark.parametrize(
    "twin", ["no-pins", "late-report-to-new-job", "no-report-on-failure", "resume-deletes-tracker"]
)
def test_walk_sees_a_bug_as_a_state_that_the_model_has_not(slice_graph, twin):
    with PATCHES[twin]():
        result = hook_walk.walk(slice_graph, BOUNDS, runs=20)
    assert "no model state" in result.failure
