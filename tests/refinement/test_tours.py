"""kvledger's scheduler side and rank ledgers along every edge of the model's graph, and what the model forbids at every state."""

import pytest

from conformance.refinement import hook_walk, tour
from conformance.refinement.twins import table as twins
from conformance.refinement.twins.in_adapter import LEDGER_PATCHES
from conformance.tla import cfg, graph
from conformance.tla.tlc import SPEC


@pytest.fixture(scope="module")
def graphs() -> dict[str, graph.Graph]:
    return {g.name: g for g in tour.graphs()}


def test_graphs_are_fit_to_test_by_and_reviewed(graphs):
    assert [w for g in graphs.values() for w in graph.lint(g)] == []
    assert graph.check_lock(list(graphs.values()), tour.LOCK) == []


def test_every_slice_is_toured_and_locked():
    listed = {*tour.SLICES, *tour.NIGHTLY}
    slices = {p.stem.removeprefix("slice-") for p in (SPEC / "slices").glob("slice-*.cfg")}
    assert slices - {hook_walk.SLICE} == listed  # that one is followed under vLLM, not toured
    assert set(graph.read_lock(tour.LOCK)) == listed


@pytest.mark.parametrize("name", tour.SLICES)
def test_every_edge_is_taken_and_every_refusal_kept(graphs, name):
    result = tour.tour(graphs[name])
    assert result.failure == ""
    assert result.edges_covered == result.edges == len(graphs[name].edges)
    assert result.refusals >= result.states  # the tour itself fails at a state where there is nothing to refuse


@pytest.mark.parametrize(("mutant", "name"), twins.BY_TOUR.items())
def test_tour_kills_the_twins_of_the_ledgers(graphs, mutant, name):
    with LEDGER_PATCHES[mutant]():
        result = tour.tour(graphs[name])
    assert result.failure != ""


NODES = "".join(f'{n} [label="/\\\\ a = {n}"{style}]\n' for n, style in ((1, ",style = filled"), (2, ""), (3, "")))


def test_lint_sees_what_cannot_be_reached():
    assert graph.lint(graph.load("x", NODES + '1 -> 2 [label="Go"];')) == ["1 states cannot be reached"]


def test_action_that_stands_in_for_another_has_the_model_s_name():
    names = cfg.parse("CONSTANTS\n  Go <- GoNarrow\n  Stop <- FALSE\n").replaced
    assert names == {"GoNarrow": "Go"}
    made = graph.load("x", NODES + '1 -> 2 [label="GoNarrow"];\n2 -> 3 [label="Stay"];', names)
    assert [action for _, action, _ in made.edges] == ["Go", "Stay"]
