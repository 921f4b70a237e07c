"""Command line of `./dev prove`."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conformance.proof import check, obligations, report, sany
from conformance.proof.check import Options
from conformance.proof.obligations import Proof
from conformance.proof.sany import ParseError
from conformance.proof.solvers import SOLVERS
from conformance.proof.syntax import Refused
from conformance.tla import tlc
from conformance.tla.java import Missing

JOBS = 2
EXAMPLE = """examples:
  ./dev prove                         what CI runs: every proof, by z3
  ./dev prove --solver z3 --solver cvc5
  ./dev prove --finite 2 --finite 3   besides, with exactly 2 and 3 members per set, everything counted
"""


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Proof]]:
    """The options and the proofs. Ends with status 2 on what it does not know."""
    p = argparse.ArgumentParser(
        prog="./dev prove", description="Prove the inductive invariants, for sets of any finite size.", epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    p.add_argument("modules", nargs="*", metavar="MODULE", help="modules of spec/proofs.toml; default: all")
    p.add_argument("--solver", action="append", choices=sorted(SOLVERS), help="default: z3")
    p.add_argument(
        "--finite", action="append", type=int, default=[], metavar="N", help="also check instances of N members per set"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    p.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"processes (default {JOBS})")
    options = p.parse_args(argv)
    proofs = obligations.load()
    unknown = set(options.modules) - {proof.module for proof in proofs}
    if unknown:
        p.error(f"no proof of {', '.join(sorted(unknown))}: there are {', '.join(proof.module for proof in proofs)}")
    return options, [proof for proof in proofs if not options.modules or proof.module in options.modules]


def prove(proof: Proof, options: Options, jobs: int) -> list[check.Report]:
    """Check one proof and print what came of it."""
    started = time.monotonic()
    reports = list(check.check(proof, sany.read(tlc.find(f"{proof.module}.tla")), options, jobs))
    print(report.summary(proof.module, reports, time.monotonic() - started))
    for line in (*report.table(reports), *report.failures(reports)):
        print(line)
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: everything proved; 1: not; 2: wrong usage, or a module that is not understood."""
    options, proofs = read(argv)
    chosen = Options(tuple(options.solver or ["z3"]), tuple(options.finite))
    reports: list[check.Report] = []
    for proof in proofs:
        try:
            reports += prove(proof, chosen, options.jobs)
        except (Refused, ParseError, Missing) as problem:
            print(f"{proof.module}: refused: {problem}", file=sys.stderr)
            return 2
    if options.json:
        options.json.write_text(json.dumps(report.as_json(reports), indent=1) + "\n")
    return 0 if all(r.ok for r in reports) else 1
