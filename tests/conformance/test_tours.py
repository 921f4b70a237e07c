"""kvledger's protocol along every edge of the model's graph, and what the model forbids at every state."""

import pytest
from kvledger_conformance import graph, tlaval, tour, twins


@pytest.fixture(scope="module")
def graphs() -> dict[str, graph.Graph]:
    return {g.name: g for g in tour.graphs()}


def test_graphs_are_fit_to_test_by_and_reviewed(graphs):
    assert [w for g in graphs.values() for w in graph.lint(g)] == []
    assert graph.check_lock(list(graphs.values()), tour.folders()[2]) == []


@pytest.mark.parametrize("name", tour.SLICES)
def test_every_edge_is_taken_and_every_refusal_kept(graphs, name):
    result = tour.tour(graphs[name], max_attempts=tour.SLICES[name])
    assert result.failure == ""
    assert result.edges_covered == result.edges == len(graphs[name].edges)
    assert result.refusals > result.states


@pytest.mark.parametrize(("twin", "name"), twins.BY_TOUR.items())
def test_tour_kills_the_protocol_twins(graphs, twin, name):
    with twins.PATCHES[twin]():
        result = tour.tour(graphs[name], max_attempts=tour.SLICES[name])
    assert result.failure != ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{1, 2}", frozenset({1, 2})),
        ('<<<<"a", 0>>, <<>>>>', (("a", 0), ())),
        ('[st |-> "none", bad |-> {}]', {"st": "none", "bad": frozenset()}),
        ('(<<"c", 0>> :> TRUE @@ 2 :> -1)', {("c", 0): True, 2: -1}),
    ],
)
def test_values(text, value):
    assert tlaval.parse(text) == value


def test_junk_is_refused():
    with pytest.raises(tlaval.ParseError):
        tlaval.parse("}")


def test_lint_sees_what_cannot_be_reached():
    nodes = "".join(f'{n} [label="/\\\\ a = {n}"{style}]\n' for n, style in ((1, ",style = filled"), (2, ""), (3, "")))
    made = graph.load("x", nodes + '1 -> 2 [label="Go"];')
    assert graph.lint(made) == ["1 states cannot be reached"]
