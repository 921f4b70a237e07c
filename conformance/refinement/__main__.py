"""`./dev conformance`: the suite on kvledger with its model's predicates, tours, twins, two-sided bugs, one summary."""

import sys
from pathlib import Path
from typing import Any

from conformance.refinement import commands, hook_walk, targets
from conformance.tla import java
from kvledger_conformance import __main__ as suite


def add_commands(known: Any) -> None:
    """The commands about the model, beside the suite's own."""
    tours = suite.add_command(
        known, "tours", commands.tours, "drive kvledger along every edge of every slice of the model"
    )
    tours.add_argument("--profile", default="dev", choices=suite.PROFILES, help="nightly: the two larger slices, too")
    tours.add_argument("--lock", action="store_true", help="keep the graphs' figures in graph.lock")
    suite.add_outputs(tours)
    about = "follow vLLM's own scheduler, with kvledger, on the model's graph"
    walk = suite.add_command(known, "walk", lambda arguments: suite.status(hook_walk.command(arguments)), about)
    walk.add_argument("--profile", default="dev", choices=suite.PROFILES)
    walk.add_argument("--json", type=Path, help="write the result there")
    twins = suite.add_command(known, "twins", commands.twins, "put each historic bug into kvledger, and find it")
    twins.add_argument("--json", type=Path, help="write the result there")
    about = "each mutant's counterexample on the code and its twin"
    two_sided = suite.add_command(known, "two-sided", commands.two_sides, about)
    two_sided.add_argument(
        "--profile", default="dev", choices=suite.PROFILES, help="ci, nightly: tours on each twin, too"
    )
    two_sided.add_argument("--twins", dest="files", nargs=1, default=[], type=Path, help="a result of twins --json")
    two_sided.add_argument("--lock", action="store_true", help="let TLC make stale counterexamples anew")
    suite.add_outputs(two_sided)
    summary = suite.add_command(known, "summary", commands.summary, "one table of all results")
    summary.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results that --json wrote")
    summary.add_argument("--markdown", type=Path, help="write the page there")


def main(argv: list[str]) -> int:
    """Run a command of this package, or one of the suite with kvledger's predicates added; exit codes are the suite's."""
    try:
        with targets.with_predicates():
            return suite.main(argv, suite.parser("./dev conformance", add_commands))
    except java.Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return suite.EXIT_USAGE


if __name__ == "__main__":
    suite.console("conformance.refinement", main)
