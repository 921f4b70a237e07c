"""Every reference in the repository leads somewhere: G7, W-25, K2 and their like, links, paths of files, names of tests.

A number is looked for where people write it: in the comments and strings of Python, the comments of TLA+, and the whole
text of everything else. So a variable K1 is no reference, and a string "K1" is one.
"""

import functools
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT, FOUND, MODEL = "docs/vllm-contract.md", "docs/found.md", "spec/README.md"

# Which page defines which numbers, and what a definition looks like there: a list item, or the first cell of a row.
HOMES = {
    CONTRACT: r"^- \*\*(G\d+|[A-Z]-\d\d)\*\* ",
    FOUND: r"^\| ([KMT]\d+) \|",
    MODEL: r"^\| (F\d+) \|",
}
NUMBER = re.compile(r"(?<![\w#-])(?:[GKMTF]\d+|[A-Z]-\d\d)(?!\w)")
LINTER = re.compile(r"noqa(: ?[A-Z]+\d+(, ?[A-Z]+\d+)*)?")  # the linter's rules have such names, too

FOLDERS = ("bench", "conformance", "demo", "docs", "impl", "scripts", "spec", "tests")
DATA = (".json", ".gz", ".lock")
FILE = re.compile(rf"(?<![\w./*-])(?:{'|'.join(FOLDERS)})/[\w./*-]+\.(?:md|py|sh|toml|tla|cfg|gz)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Files that git knows or would take: text only, and none of the texts that the demo's prompts are made of."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", *FOLDERS],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / line for line in sorted(set(listed.stdout.splitlines()))]
    return tuple(p for p in paths if p.is_file() and p.suffix not in DATA and not p.match("demo/texts/*.txt"))


def pages() -> tuple[Path, ...]:
    return tuple(p for p in tracked() if p.suffix == ".md")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path, text: str) -> str:
    """What of a file is written for people, with as many lines as the file has."""
    if path.suffix == ".py":
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for i, line in enumerate(token.string.split("\n")):
                    lines[token.start[0] - 1 + i] += f" {line}"
        return LINTER.sub("", "\n".join(lines))
    if path.suffix == ".tla":
        kept = re.compile(r"\(\*.*?\*\)|\\\*[^\n]*", re.DOTALL)
        return "".join(m.group() + "\n" for m in kept.finditer(text))
    return text


@functools.cache
def written(path: Path) -> str:
    return prose(path, path.read_text(encoding="utf-8"))


@functools.cache
def defined() -> dict[str, list[str]]:
    """Number → the pages that define it."""
    found: dict[str, list[str]] = {}
    for page, pattern in HOMES.items():
        for number in re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(number, []).append(page)
    return found


def unprotected(text: str) -> str:
    """A page without its code: nothing in there is a link or a heading."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    fenced_out = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", fenced_out, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        copies = sum(a == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", a) is not None for a in found)
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead to no file of the repository, or to no heading of it."""
    broken = []
    for link in LINK.findall(unprotected(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        known = anchors(text if target == page else target.read_text("utf-8")) if anchor and target.is_file() else set()
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in known):
            broken.append(link)
    return broken


def test_each_number_is_defined_once() -> None:
    assert {n: where for n, where in defined().items() if len(where) > 1} == {}
    assert {"G1", "W-01", "K1", "M1", "T1", "F1"} <= set(defined())


def test_each_number_that_is_referred_to_is_defined() -> None:
    dangling = [f"{name(p)}: {n}" for p in tracked() for n in NUMBER.findall(written(p)) if n not in defined()]
    assert sorted(set(dangling)) == []


def test_each_link_leads_to_a_file_and_a_heading() -> None:
    assert [f"{name(p)}: {link}" for p in pages() for link in broken_links(p, p.read_text(encoding="utf-8"))] == []


def test_each_file_that_is_named_exists() -> None:
    named = {(name(p), file) for p in tracked() for file in FILE.findall(written(p))}
    assert len(named) > 100
    assert sorted(f"{where}: {file}" for where, file in named if not any(ROOT.glob(file))) == []


def test_each_test_that_a_page_names_exists() -> None:
    files = [p for p in tracked() if p.is_relative_to(ROOT / "tests") and p.suffix == ".py"]
    tests = {p.stem for p in files} | {t for p in files for t in re.findall(r"def (test_\w+)", p.read_text("utf-8"))}
    named = {(name(p), test) for p in pages() for test in re.findall(r"\btest_\w+", p.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert sorted(f"{where}: {test}" for where, test in named if test not in tests) == []


@pytest.mark.parametrize(
    ("file", "text", "numbers"),
    [
        ("a.md", "contract G7, W-25 kind (K2): see F10.", ["G7", "W-25", "K2", "F10"]),
        ("a.md", "an H200, #F00, P2P, G7x, xG7, S-1, AB-12", []),
        ("a.py", "K1 = 2  # noqa: F401, G004\n", []),
        ("a.py", 'K1 = "found K3"  # by T4\n', ["K3", "T4"]),
        ("a.tla", "T1 == F1 \\* see F2\n(* G3 and\n G4 *) M1", ["F2", "G3", "G4"]),
    ],
)
def test_what_counts_as_a_reference(file: str, text: str, numbers: list[str]) -> None:
    assert NUMBER.findall(prose(Path(file), text)) == numbers


def test_what_counts_as_a_broken_link() -> None:
    page = ROOT / "docs" / "README.md"
    text = "# A `b`: C\n[ok](protocol.md) [ok](#a-b-c) [ok](../spec/README.md#mutants) [ok](https://x) `[no](code)`\n"
    assert broken_links(page, text) == []
    bad = ["gone.md", "#a-b", "protocol.md#gone", "../../outside.md"]
    assert broken_links(page, text + " ".join(f"[bad]({link})" for link in bad)) == bad
