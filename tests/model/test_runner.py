"""The runner's own parts: value parser, configuration files, reading TLC's output, the story."""

import json
from pathlib import Path

import pytest

from conformance.model import lint, main, manifest, mutate, readme, story
from conformance.tla import cfg, java, tlc, value
from conformance.tla.tlc import SPEC

STEP_1 = """/\\ rst = <<"waiting">>
/\\ rp = << <<"a", "b">> >>
/\\ rgen = <<0>>
/\\ tbl = <<<<0, 0>>>>
/\\ ref = <<0, 0>>
/\\ led = <<[st |-> "none", held |-> {}, rep |-> {}, cnt |-> 0, bad |-> {}]>>
/\\ job = <<[kind |-> "none", req |-> 0, gen |-> 0, sync |-> FALSE, epoch |-> 0, items |-> {}]>>
/\\ trk = <<[gen |-> 0, front |-> 0, retry |-> {}, load |-> "none", att |-> <<0, 0>>]>>
/\\ rk = <<<<[st |-> "none", bad |-> {}]>>>>
/\\ pipe = <<[on |-> FALSE, req |-> 0, wr |-> {}, rd |-> {}, jobs |-> {}, rep |-> {}]>>
/\\ mem = << << <<"junk", 0>>, <<"junk", 0>> >> >>
/\\ dma = {}
/\\ store = <<(<<"a", 0>> :> <<"none", 0>>)>>"""
STEP_2 = (
    STEP_1.replace('<<"waiting">>', '<<"running">>')
    .replace("rgen = <<0>>", "rgen = <<1>>")
    .replace("<<<<0, 0>>>>", "<<<<2, 0>>>>")
    .replace("ref = <<0, 0>>", "ref = <<0, 2>>")
    .replace('st |-> "none", held |-> {}', 'st |-> "live", held |-> {2}')
    .replace('kind |-> "none", req |-> 0, gen |-> 0', 'kind |-> "store", req |-> 1, gen |-> 1')
    .replace("items |-> {}", 'items |-> {<<1, 2, "a">>}')
    .replace(':> <<"none", 0>>', ':> <<"junk", 0>>')
)
OUTPUT = f"""TLC2 Version 2.15
Error: Invariant NoPoison is violated.
Error: The behavior up to this point is:
State 1: <Initial predicate>
{STEP_1}

State 2: <AdmitCompute line 75, col 3 to line 86, col 20 of module MooncakeStore>
{STEP_2}

27 states generated, 12 distinct states found, 5 states left on queue.
The depth of the complete state graph search is 2.
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("-7", -7),
        ('"a \\"b\\""', 'a "b"'),
        ("TRUE", True),
        ("m1", "m1"),
        ("<<>>", ()),
        ("<< >>", ()),
        ("{}", frozenset()),
        ("1..3", frozenset({1, 2, 3})),
        ("3..2", frozenset()),
        ('{<<1, "a">>, <<2, "b">>}', frozenset({(1, "a"), (2, "b")})),
        ('[st |-> "live", held |-> {1, 2}]', {"st": "live", "held": frozenset({1, 2})}),
        ('(<<"a", 0>> :> 1 @@ <<"b", 0>> :> 2)', {("a", 0): 1, ("b", 0): 2}),
        ("(0 :> <<1,\n 2>>)", {0: (1, 2)}),
    ],
)
def test_values(text: str, expected: object) -> None:
    assert value.parse(text) == expected


@pytest.mark.parametrize("text", ["", "<<1", "{1, }x", "[a |-> ]", "1 2", "#", "(1 :> )"])
def test_what_is_not_a_value_is_refused(text: str) -> None:
    with pytest.raises(value.NotAValue):
        value.parse(text)


def test_a_function_is_a_function_however_it_is_printed() -> None:
    assert value.entries(value.parse("<<5, 6>>")) == value.entries(value.parse("(1 :> 5 @@ 2 :> 6)")) == {1: 5, 2: 6}


def test_records_may_be_members_of_sets() -> None:
    assert len(value.parse("{[a |-> 1], [a |-> 1], [a |-> 2]}")) == 2


def test_output_is_read() -> None:
    run = tlc.read(OUTPUT, 12)
    assert (run.result, run.property, run.distinct, run.generated) == ("invariant", "NoPoison", 12, 27)
    assert [action for action, _ in run.trace] == ["Initial", "AdmitCompute"]


def test_initial_violation_is_read() -> None:
    run = tlc.read("Error: Invariant IndInv is violated by the initial state:\n/\\ x = 1\n/\\ y = 2\n\nFinished", 12)
    assert run.trace == [("Initial", "/\\ x = 1\n/\\ y = 2")]


def test_dead_actions_are_read() -> None:
    coverage = "The coverage statistics at x\n<Compute line 1, col 1 to line 2, col 9 of module M>: 3:5\n"
    coverage += "<Evict line 1, col 1 to line 1, col 2 of module M (3 4 5 6)>: 0:0\n"
    assert tlc.read_actions(coverage) == {"Compute": 5, "Evict": 0}


def test_the_story_says_who_did_what() -> None:
    told = story.tell(tlc.read(OUTPUT, 12).trace, "NoPoison")
    assert "scheduler: the request is admitted  [AdmitCompute]" in told
    assert "request 1: waiting -> running, blocks [] -> [b2], generation 1" in told
    assert "job 1 emitted: store block 2 = a (request 1, generation 1, pins {b2})" in told
    assert "store, shard 1: key a now holds WRONG BYTES" in told
    assert told.endswith("=> NoPoison does not hold here.")


def test_the_story_of_another_module_is_plain() -> None:
    assert "x = 2" in story.tell([("Initial", "/\\ x = 1"), ("Step", "/\\ x = 2")], "P")


def test_configurations_survive_reading_and_writing(tmp_path: Path) -> None:
    for file in SPEC.rglob("*.cfg"):
        once = cfg.read(file)
        (tmp_path / "again.cfg").write_text(once.text(), encoding="utf-8")
        assert cfg.read(tmp_path / "again.cfg") == once


def test_a_constant_can_be_replaced_and_removed(tmp_path: Path) -> None:
    text = "SPECIFICATION S\nCONSTANTS\n  A = 1 \\* one\n  B <- FALSE\nINVARIANTS\n  I\n"
    (tmp_path / "a.cfg").write_text(text, encoding="utf-8")
    changed = cfg.read(tmp_path / "a.cfg").changed({"A": "= 2", "B": ""}, invariants=["J"])
    assert changed.constants == {"A": "= 2"}
    assert changed.invariants == ("J",)


def test_a_broken_configuration_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text("SPECIFICATION S\nCONSTANTS\n  A + 1\n", encoding="utf-8")
    with pytest.raises(cfg.CfgError, match=r"a\.cfg:3"):
        cfg.read(tmp_path / "a.cfg")


CHECK = manifest.Check(name="m", kind="mutant", module="MC", base="MC", expected="violated", property="NoPoison")
MODEL = manifest.Check(name="m", kind="model", module="MC", base="MC")


@pytest.mark.parametrize(
    ("check", "run", "expected", "says"),
    [
        (MODEL, tlc.Run("pass", distinct=3, depth=2), {"distinct": 3, "depth": 2}, ""),
        (MODEL, tlc.Run("pass", distinct=4, depth=2), {"distinct": 3, "depth": 2}, "figures differ"),
        (MODEL, tlc.Run("pass", distinct=4, depth=2), {}, "no recorded figures"),
        (MODEL, tlc.Run("invariant", property="TypeOK"), {}, "expected no error"),
        (MODEL, tlc.Run("timeout"), {}, "expected no error"),
        (CHECK, tlc.Run("invariant", property="NoPoison", trace=[("Initial", "")]), {"trace": 1}, ""),
        (CHECK, tlc.Run("invariant", property="TypeOK"), {"trace": 0}, "but TypeOK did"),
        (CHECK, tlc.Run("pass"), {}, "expected NoPoison to fail"),
        (CHECK, tlc.Run("evaluation error"), {}, "expected NoPoison to fail"),
    ],
)
def test_verdicts(check: manifest.Check, run: tlc.Run, expected: dict[str, int], says: str) -> None:
    said = main.verdict(check, run, expected)
    assert says in said
    assert bool(said) == bool(says)


def test_every_check_has_figures_and_an_own_name() -> None:
    checks = manifest.load()
    names = [c.name for c in checks]
    assert len(names) == len(set(names))
    assert set(manifest.counts()) <= set(names)
    with_figures = {c.name for c in checks if c.expected in {"pass", "violated"} and c.shortest and not c.deep}
    assert with_figures <= set(manifest.counts())
    assert {c.name for c in checks if not c.shortest}.isdisjoint(manifest.counts())


def test_every_replacement_exists() -> None:
    modules = "\n".join(f.read_text(encoding="utf-8") for f in SPEC.rglob("*.tla"))
    for check in manifest.load():
        for name, new in check.constants.items():
            assert name in modules
            operator = new.removeprefix("<- ")
            if new.startswith("<- ") and operator != "FALSE":
                assert f"\n{operator}" in modules, (check.name, operator)


def test_every_property_is_in_a_model_and_kills_a_mutant() -> None:
    said = [c for c in lint.complaints(manifest.load(), []) if not c.startswith("action")]
    assert said == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nosuch MC", "no model, reach check or mutant is named nosuch. See: ./dev spec --list"),
        ("--cfg nosuch", "no model, reach check or mutant is named nosuch"),
        ("--generated no-pins", "no generated mutant is named no-pins"),
        ("--gen", "unrecognized arguments: --gen"),
        ("--resume some.json", "--resume goes with --generated"),
        ("--generated --record", "--generated goes with --resume, --json and --jobs only"),
        ("--cfg MC no-pins", "no further name goes with them"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments.split())
    assert says in capsys.readouterr().err


def test_names_choose_what_runs_and_long_models_run_when_asked_for() -> None:
    everything = manifest.load()
    assert [c.name for c in main.read(["no-pins", "MC"])[1]] == [
        c.name for c in everything if c.name in ("MC", "no-pins")
    ]
    assert main.read([])[1] == [c for c in everything if not c.deep]
    assert main.read(["--deep"])[1] == everything
    one = mutate.generate()[3]
    assert main.read(["--generated", one.name])[2] == [one]


def test_a_missing_jar_is_one_sentence_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TLA2TOOLS_JAR", "/nonexistent/tla2tools.jar")
    assert main.main(["MC"]) == 2
    assert "Remedy:" in capsys.readouterr().err


def test_one_real_run_with_json(tmp_path: Path) -> None:
    try:
        java.java(), java.jar()
    except java.Missing as e:
        pytest.skip(str(e))
    assert main.main(["no-pins", "UtilTest", "--json", str(tmp_path / "out.json")]) == 0
    out = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [m["name"] for m in out["models"]] == ["UtilTest"]
    assert out["mutants"][0]["killed_by"] == "PinnedNotFreed"


def test_the_readme_shows_the_recorded_figures() -> None:
    assert readme.current() == readme.table()
