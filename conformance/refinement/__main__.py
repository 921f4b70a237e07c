"""`./dev conformance`: the suite on kvledger with its model's predicates, tours, twins, two-sided bugs, one summary."""

import argparse
import json
import sys
from pathlib import Path

from conformance.refinement import targets
from conformance.tla import java
from kvledger_conformance import __main__ as suite
from kvledger_conformance.suite import loading


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="./dev conformance",
        description=__doc__,
        epilog="and the suite's own: run (the default), replay, matrix, properties; each has --help",
        allow_abbrev=False,
    )
    commands = out.add_subparsers(metavar="COMMAND", required=True)
    tours = suite.add_command(commands, "tours", _tours, "drive kvledger along every edge of every slice of the model")
    tours.add_argument("--profile", default="dev", choices=suite.PROFILES, help="nightly: the two larger slices, too")
    tours.add_argument("--lock", action="store_true", help="keep the graphs' figures in graph.lock")
    suite.add_outputs(tours)
    walk = suite.add_command(
        commands, "walk", _walk, "follow vLLM's own scheduler, with kvledger, on the model's graph"
    )
    walk.add_argument("--profile", default="dev", choices=suite.PROFILES)
    walk.add_argument("--json", type=Path, help="write the result there")
    twins = suite.add_command(commands, "twins", _twins, "put each historic bug into kvledger, and find it")
    twins.add_argument("--json", type=Path, help="write the result there")
    two_sided = suite.add_command(
        commands, "two-sided", _two_sided, "each mutant's counterexample on the code and its twin"
    )
    two_sided.add_argument(
        "--profile", default="dev", choices=suite.PROFILES, help="ci, nightly: tours on each twin, too"
    )
    two_sided.add_argument("--twins", dest="files", nargs=1, default=[], type=Path, help="a result of twins --json")
    two_sided.add_argument("--lock", action="store_true", help="let TLC make stale counterexamples anew")
    suite.add_outputs(two_sided)
    summary = suite.add_command(commands, "summary", _summary, "one table of all results")
    summary.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results that --json wrote")
    summary.add_argument("--markdown", type=Path, help="write the page there")
    return out


COMMANDS = ("tours", "walk", "twins", "two-sided", "summary")


def main(argv: list[str]) -> int:
    """Run a command of this package, or one of the suite with kvledger's predicates added; exit codes are the suite's."""
    if argv[:1] and argv[0] in (*COMMANDS, "-h", "--help"):
        try:
            return suite.carry_out(parser().parse_args(argv), argv)
        except java.Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return suite.EXIT_USAGE
    targets.add_predicates()
    return suite.main(argv)


def _said(holds: bool) -> int:
    return suite.EXIT_HOLDS if holds else suite.EXIT_BROKEN


def _say(line: str) -> None:
    print(line, flush=True)


def _tours(arguments: argparse.Namespace) -> int:
    from conformance.refinement import commands

    return _said(commands.tours(arguments))


def _walk(arguments: argparse.Namespace) -> int:
    from conformance.refinement import hook_walk

    return _said(hook_walk.command(arguments))


def _twins(arguments: argparse.Namespace) -> int:
    loading.target_for("kvledger", None)
    from conformance.refinement.twins import table

    rows = table.run_all(say=_say)
    if arguments.json:
        arguments.json.write_text(json.dumps({"twins": rows}, indent=1) + "\n")
    return _said(all(r["killed"] for r in rows))


def _two_sided(arguments: argparse.Namespace) -> int:
    from conformance.refinement import commands

    return _said(commands.two_sides(arguments))


def _summary(arguments: argparse.Namespace) -> int:
    from conformance.refinement import commands

    return _said(commands.summary(arguments))


if __name__ == "__main__":
    suite.console("conformance.refinement", main)
