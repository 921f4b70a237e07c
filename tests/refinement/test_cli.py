"""`./dev conformance` called wrongly, or without what it needs."""

import pytest

from conformance.refinement import __main__ as cli
from conformance.refinement.targets import with_predicates
from kvledger_conformance.__main__ import EXIT_USAGE
from kvledger_conformance.suite import targets


def test_tours_without_java_or_tlc(monkeypatch, capsys):
    monkeypatch.setenv("TLA2TOOLS_JAR", "/nowhere/tla2tools.jar")
    assert cli.main(["tours"]) == EXIT_USAGE
    assert "/nowhere/tla2tools.jar is not a file. Remedy: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["tours", "--target", "kvledger"], ["walk", "--lock"], ["summary"], ["twins", "x"]]
)
def test_commands_refuse_what_they_do_not_know(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == EXIT_USAGE
    assert "usage: ./dev conformance" in capsys.readouterr().err


def test_kvledger_is_checked_against_its_model():
    with with_predicates():
        checked = {name for name, target in targets.BUILT_IN.items() if target.refine is not None}
    assert checked == {name for name in targets.BUILT_IN if name.startswith("kvledger")}
    assert [name for name, target in targets.BUILT_IN.items() if target.refine is not None] == []
