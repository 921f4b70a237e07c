"""`suite/scenarios.txt`: what a line becomes, and that one which means nothing is refused by file, line and remedy."""

from typing import Any

import pytest

from kvledger_conformance.engine.compat import Shape
from kvledger_conformance.suite.scenarios import SCENARIOS, Scenario, parse

GOOD = """
# a comment
snippet: STORED
    add a abc
    steps 8

scenario: a name: with a colon
source: vLLM #1
breaks: goes-idle
past: engine-alive, outputs-right
shape: ranks=2 role=kv_producer
    use STORED
    # another
    add b ab tokens=8 stop=3
    fault get code code=-704 times=None
    reset running=True
    open operation=put"""


def test_lines_become_actions():
    script: list[dict[str, Any]] = [
        {"do": "add", "name": "a", "blocks": "abc", "tail": 1, "tokens": 2},
        {"do": "steps", "count": 8},
        {"do": "add", "name": "b", "blocks": "ab", "tail": 1, "tokens": 8, "stop": 3},
        {"do": "fault", "operation": "get", "kind": "code", "code": -704, "times": None},
        {"do": "reset", "running": True},
        {"do": "open", "operation": "put"},
    ]
    assert parse(GOOD, "x.txt") == (
        Scenario(
            "a name: with a colon",
            "vLLM #1",
            "goes-idle",
            script,
            Shape(ranks=2, role="kv_producer"),
            past=frozenset({"engine-alive", "outputs-right"}),
        ),
    )


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        ("    steps 8", "    stpes 8", r":5: no verb is called 'stpes'; there are add, abort, step"),
        ("    steps 8", "    steps", r":5: missing a required argument: 'count'; arguments are \(count: int\)"),
        ("    steps 8", "    steps 8 9", r":5: too many positional arguments; arguments are"),
        ("    steps 8", "    steps number=8", r":5: .*'(count|number)'; arguments are \(count: int\)"),
        ("    steps 8", "    steps count=8 count=9", r":5: an argument is given twice; arguments are"),
        ("    steps 8", "    steps eight", r":5: 'eight' is no .*int.*; arguments are"),
        ("    use STORED", "    use STOLEN", r":12: no snippet is called 'STOLEN'; there are STORED"),
        ("source: vLLM #1", "sauce: vLLM #1", r":8: no key is called 'sauce'; there are scenario, snippet, source"),
        ("source: vLLM #1", "scenario: vLLM #1", r":8: 'scenario' for the second time; an empty line ends"),
        ("source: vLLM #1", "# none", r":18: .* needs actions, and either snippet or scenario, source and breaks"),
        ("snippet: STORED", "snippet: STORED\npast: outputs-right\nsource: x", r":8: what ends here needs"),
        ("breaks: goes-idle", "breaks: goes-idel", r":9: no property is called 'goes-idel'; there are blocks-held"),
        ("past: engine-alive,", "past: engine-dead,", r":10: no property is called 'engine-dead'; there are"),
        ("shape: ranks=2", "shape: rnks=2", r":11: .*'rnks'; arguments are .*ranks: int = 1"),
    ],
)
def test_line_that_means_nothing_is_refused(line, instead, said):
    assert GOOD.count(line) == 1
    with pytest.raises(ValueError, match=rf"^x\.txt{said}"):
        parse(GOOD.replace(line, instead), "x.txt")


def test_names_are_unique():
    names = [s.name for s in SCENARIOS]
    assert len(set(names)) == len(names) >= 39
