"""Mutation testing of impl/kvledger/protocol with mutmut: every mutant is killed by a unit test or explained.

Usage: scripts/mutation.sh [--only GLOB] [--json FILE] [--jobs N]

mutmut changes files, so it works on a copy (.cache/mutation/work). mutmut leaves decorated functions alone, so the copy
spells `@property` as a plain method and `name = property(method)`: nothing else differs from the code that is tested.
"""

import argparse
import ast
import fnmatch
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.mutation.verdict import Mutant, Verdict, judge, mutant_of, read_survivors

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / ".cache" / "mutation" / "work"
SURVIVORS = HERE / "survivors.toml"
GETTER = "_property_"


def plain_properties(source: str) -> str:
    """The same module with each property as a method that mutmut mutates."""
    lines = source.splitlines()
    tree = ast.parse(source)
    methods = [m for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef)]
    for method in sorted(methods, key=lambda m: -m.lineno):
        if [ast.unparse(d) for d in method.decorator_list] == ["property"]:
            lines.insert(method.end_lineno or 0, f"\n    {method.name} = property({GETTER}{method.name})")
            lines[method.lineno - 1] = lines[method.lineno - 1].replace(method.name, GETTER + method.name, 1)
            del lines[method.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def make_copy() -> None:
    """The code under test and its unit tests, and nothing else, in a fresh folder."""
    shutil.rmtree(WORK, ignore_errors=True)
    package = ROOT / "impl" / "kvledger"
    for source in [package / "__init__.py", package / "errors.py", *sorted((package / "protocol").glob("*.py"))]:
        target = WORK / "src" / source.relative_to(ROOT / "impl")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(plain_properties(source.read_text(encoding="utf-8")), encoding="utf-8")
    tests = ROOT / "tests"
    unit = sorted((tests / "unit" / "protocol").glob("test_*.py"))
    for file in [tests / "__init__.py", tests / "support" / "__init__.py", tests / "support" / "ledgers.py", *unit]:
        target = WORK / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copy(HERE / "workspace.toml", WORK / "pyproject.toml")


def function_of(name: str) -> str:
    """`ledger.Ledger.reset` for mutmut's `kvledger.protocol.ledger.xǁLedgerǁreset__mutmut_3`."""
    mangled, _, _ = name.removeprefix("kvledger.protocol.").partition("__mutmut_")
    module, _, function = mangled.partition(".")
    parts = function[2:] if function.startswith("x_") else function[1:].strip("ǁ").replace("ǁ", ".")
    return f"{module}.{parts}".replace(GETTER, "")


def pattern_of(only: str) -> str:
    """mutmut's names of (at least) the mutants of the chosen functions."""
    module, _, function = only.partition(".")
    outer, dot, inner = (function or "*").rpartition(".")
    return f"kvledger.protocol.{module}.x?{outer.replace('.', 'ǁ')}{'ǁ*' if dot else ''}{inner}__mutmut_*"


def _results() -> list[tuple[Path, dict[str, int | None]]]:
    found = []
    for meta in sorted((WORK / "mutants" / "src").rglob("*.meta")):
        path = meta.relative_to(WORK / "mutants").with_suffix("")
        found.append((path, json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]))
    return found


def how_they_ended(only: str) -> list[tuple[Mutant, str]]:
    """Every mutant of the chosen functions with mutmut's word for its end."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant  # in this tool's own environment only
    from mutmut.stats import status_by_exit_code

    return [
        (mutant_of(function_of(name), get_diff_for_mutant(name, path=path)), status_by_exit_code[code])
        for path, codes in _results()
        for name, code in codes.items()
        if fnmatch.fnmatch(function_of(name), only)
    ]


def run_mutmut(names: list[str], jobs: int) -> None:
    """mutmut's own output goes to a log; the last line of it is shown if it fails."""
    mutmut = Path(sys.executable).parent / "mutmut"
    with (WORK / "mutmut.log").open("w") as log:
        command = [str(mutmut), "run", "--max-children", str(jobs), *names]
        code = subprocess.run(command, cwd=WORK, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        tail = (WORK / "mutmut.log").read_text(errors="replace").replace("\r", "\n").splitlines()[-25:]
        sys.exit("\n".join([*tail, f"error: mutmut ended with {code}; all of it is in {WORK / 'mutmut.log'}"]))


def entry(mutant: Mutant) -> str:
    """A mutant as survivors.toml would have it."""
    fields = [("function", mutant.function), ("was", mutant.was), ("now", mutant.now), ("reason", "")]
    return "\n".join(["[[survivor]]", *(f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in fields)])


def show(verdict: Verdict, cpu_s: float, wall_s: float) -> None:
    """The page that a person reads."""
    for mutant in verdict.unexplained:
        print(f"no test tells this mutant from the code:\n\n{entry(mutant)}\n")
    for mutant in verdict.stale:
        print(f"explained, but no such mutant lives (any more): remove it from survivors.toml\n\n{entry(mutant)}\n")
    total = sum(verdict.statuses.values())
    ends = ", ".join(f"{count} {status}" for status, count in verdict.statuses.items())
    print(f"{total} mutants: {ends}")
    print(
        f"survivors explained {verdict.explained}, unexplained {len(verdict.unexplained)}, stale {len(verdict.stale)}"
    )
    print(f"{cpu_s:.0f} s of CPU time in {wall_s:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutation.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="functions, as in 'ledger.Ledger.emit_*'")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at a time (default 2)")
    parser.add_argument(
        "--json", type=lambda name: Path(name).absolute(), metavar="FILE", help="write the figures there"
    )
    chosen = parser.parse_args()
    explained = read_survivors(SURVIVORS)
    started = time.monotonic()
    make_copy()
    run_mutmut([] if chosen.only == "*" else [pattern_of(chosen.only)], chosen.jobs)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, wall_s = usage.ru_utime + usage.ru_stime, time.monotonic() - started
    os.chdir(WORK)  # where mutmut looks for its settings
    verdict = judge(how_they_ended(chosen.only), explained, complete=chosen.only == "*")
    show(verdict, cpu_s, wall_s)
    if chosen.json:
        figures = {
            "mutants": sum(verdict.statuses.values()),
            **verdict.statuses,
            "explained": verdict.explained,
            "unexplained": len(verdict.unexplained),
            "stale": len(verdict.stale),
            "cpu_s": round(cpu_s),
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
