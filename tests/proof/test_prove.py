"""The inductive model is proved for any finite sets, and a module that is wrong is refused with a step that shows why."""

from pathlib import Path

import pytest

from conformance.proof import check, sany
from conformance.proof.check import Options, Report
from conformance.proof.main import main
from conformance.proof.obligations import Proof, load
from conformance.proof.syntax import Refused
from conformance.tla import tlc

NAME = "MooncakeStoreInd"
SOURCE = next(folder / f"{NAME}.tla" for folder in tlc.FOLDERS if (folder / f"{NAME}.tla").exists())


@pytest.fixture
def proof() -> Proof:
    (found,) = [p for p in load() if p.module == NAME]
    return found


def reports(proof: Proof, folder: Path, old: str, new: str) -> list[Report]:
    """What comes of the module with one piece of its text changed."""
    text = SOURCE.read_text()
    assert old in text
    changed = folder / SOURCE.name
    changed.write_text(text.replace(old, new, 1))
    return list(check.check(proof, sany.read(changed), Options(), 2))


def test_the_inductive_model_is_proved_for_sets_of_any_finite_size(capsys):
    assert main([NAME]) == 0
    assert "for sets of any finite size: proved" in capsys.readouterr().out


@pytest.mark.parametrize("conjunct", ["IndRefs", "IndDma", "IndBytes", "IndFence"])
def test_an_invariant_without_a_conjunct_that_it_needs_is_refused_with_a_step(proof, tmp_path, conjunct):
    found = reports(proof, tmp_path, f"/\\ {conjunct} /\\", "/\\")
    broken = [result for report in found for result in report.failed]
    assert broken
    assert any(result.counterexample is not None for result in broken)


def test_what_is_not_understood_is_refused_by_name_and_place(proof, tmp_path):
    with pytest.raises(Refused, match="not understood"):
        reports(proof, tmp_path, "IndClean == ~poison", "IndClean == UNION {Blocks} = {}")
