"""The verdict on a mutation run can fail: an unexplained survivor, a stale entry, an entry without a reason."""

from collections import Counter
from typing import Any

import pytest

from tests.mutation.run import SURVIVORS, function_of, pattern_of, plain_properties
from tests.mutation.verdict import BadEntry, Mutant, judge, mutant_of, read_survivors

ONE = Mutant("pins.PinTable.pin", "a = 1", "a = 2")
TWO = Mutant("rank.RankLedger.start", "b = 1", "b = 2")


def write(tmp_path, text: str):
    file = tmp_path / "survivors.toml"
    file.write_text(text, encoding="utf-8")
    return file


def entry(mutant: Mutant, extra: str = 'reason = "it is the same"') -> str:
    return f'[[survivor]]\nfunction = "{mutant.function}"\nwas = "{mutant.was}"\nnow = "{mutant.now}"\n{extra}\n'


def test_holds_when_every_survivor_is_explained():
    verdict = judge([(ONE, "survived"), (TWO, "killed"), (TWO, "timeout")], Counter([ONE]))
    assert verdict.holds
    assert (verdict.explained, verdict.statuses) == (1, {"survived": 1, "killed": 1, "timeout": 1})


@pytest.mark.parametrize("status", ["survived", "no tests", "suspicious", "not checked", "segfault"])
def test_whatever_was_not_killed_needs_an_explanation(status):
    verdict = judge([(ONE, status)], Counter())
    assert not verdict.holds
    assert verdict.unexplained == [ONE]


def test_the_same_change_twice_needs_to_be_explained_twice():
    assert judge([(ONE, "survived")] * 2, Counter([ONE])).unexplained == [ONE]
    assert judge([(ONE, "survived")] * 2, Counter([ONE, ONE])).holds


@pytest.mark.parametrize("ended", [[], [(ONE, "killed")]])
def test_an_entry_that_is_not_needed_is_stale(ended):
    verdict = judge(ended, Counter([ONE]))
    assert not verdict.holds
    assert verdict.stale == [ONE]


def test_a_run_of_one_function_says_nothing_of_the_others():
    assert judge([(TWO, "killed")], Counter([ONE]), complete=False).holds
    assert not judge([(ONE, "killed")], Counter([ONE]), complete=False).holds


def test_an_entry_needs_a_reason_and_is_there_once(tmp_path):
    with pytest.raises(BadEntry, match="no reason"):
        read_survivors(write(tmp_path, entry(ONE, 'reason = " "')))
    with pytest.raises(BadEntry, match="there twice"):
        read_survivors(write(tmp_path, entry(ONE) * 2))
    assert read_survivors(write(tmp_path, entry(ONE, 'reason = "so"\ntimes = 2'))) == Counter([ONE, ONE])


def test_the_repositorys_own_entries_can_be_read():
    assert read_survivors(SURVIVORS).total() > 0


def test_a_mutant_is_known_by_the_lines_it_changes():
    diff = "--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n def pin():\n-    a = 1\n+    a = 2\n     return a"
    assert mutant_of("pins.PinTable.pin", diff) == ONE


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("kvledger.protocol.rank.xǁRankLedgerǁ_start__mutmut_3", "rank.RankLedger._start"),
        ("kvledger.protocol.rank.x__all__mutmut_1", "rank._all"),
        ("kvledger.protocol.pins.xǁPinTableǁ_property_is_full__mutmut_1", "pins.PinTable.is_full"),
    ],
)
def test_mutmuts_names_are_read_and_can_be_asked_for(name, function):
    import fnmatch

    assert function_of(name) == function
    for only in (function, function.partition(".")[0] + ".*"):
        assert fnmatch.fnmatchcase(name, pattern_of(only))


def test_properties_become_methods_that_do_the_same():
    source = (
        "class A:\n    @property\n    def one(self):\n        return 1\n\n"
        "    @staticmethod\n    def two():\n        return 2\n\n"
        "    @property\n    def three(self):\n        return 3\n"
    )
    changed = plain_properties(source)
    found: dict[str, Any] = {}
    exec(changed, found)
    it = found["A"]()
    assert (it.one, it.two(), it.three) == (1, 2, 3)
    assert "@property" not in changed
    assert "@staticmethod" in changed
