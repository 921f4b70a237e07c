"""``python -m demo``: see ``./dev demo --help``."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

from demo import model, report
from demo.children import ChildError
from demo.driver import Driver
from demo.plan import Plan
from demo.progress import when_unread

EXAMPLE = """\
example:
  ./dev demo                                 the main job, about three minutes
  ./dev demo --tp 2 --store-delay 50         two ranks, every transfer held for 50 ms
  ./dev demo --quick --json result.json      fewer prompts, and the figures as JSON
"""
SAME_NAME = ("dtype", "connector", "load_sync", "transfer_mode", "cold_only", "kill_master")  # options as in the plan


class Exit(IntEnum):
    """Exit codes of the demo."""

    OK = 0
    WRONG_RESULT = 1  # it ran, and something that must hold does not
    USAGE = 2
    BROKEN = 3  # it could not run to its end
    INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev demo",
        description="Serve real prompts through real vLLM with kvledger and a real Mooncake store, out of a KV pool "
        "that is too small; serve them again from the store in a new process; check every output and stored byte.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel ranks, each a process (default 1)")
    add("--store-delay", type=int, default=0, metavar="MS", help="hold every transfer for so long (default 0)")
    add("--model", type=Path, metavar="DIR", help="a Hugging Face model folder (default: SmolLM2-135M-Instruct)")
    dtype = "default float32, in which greedy outputs do not depend on batch shapes"
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help=dtype)
    add("--prompts", type=int, metavar="N", help="how many prompts (default 24, with --quick 12)")
    add("--quick", action="store_true", help="fewer prompts, fewer new tokens, an even smaller pool")
    pool = "KV blocks of the cold and warm engines (default 64, with --quick 48)"
    add("--pool-blocks", type=int, metavar="N", help=pool)
    add("--reference", type=Path, metavar="DIR", help="keep the reference run there, or use the one that is there")
    add("--connector", metavar="MODULE:CLASS", help="test this connector class instead of kvledger's own")
    add("--load-sync", action="store_true", help="load from the store inside the step instead of beside it")
    add("--transfer-mode", choices=("direct", "staged"), help="how bytes move (default: the connector's choice)")
    add("--cold-only", action="store_true", help="no second engine: serve once, then audit")
    add("--kill-master", action="store_true", help="kill the Mooncake master in the middle of the cold run")
    add("--trace", type=Path, metavar="DIR", help="record the protocol's events there, for ./dev trace check")
    add("--json", type=Path, metavar="FILE", help="write the figures there, as one JSON object")
    add("--keep", type=Path, metavar="DIR", help="work in this empty folder and keep it: logs, orders, results")
    options = parser.parse_args(arguments)
    if options.connector and ":" not in options.connector:
        parser.error("--connector wants MODULE:CLASS, for example tests.twins.early_release:EarlyReleaseConnector")
    if options.store_delay < 0:
        parser.error(f"--store-delay wants a number of milliseconds, not {options.store_delay}")
    if options.tp < 1:
        parser.error(f"--tp wants at least one rank, not {options.tp}")
    return options


def plan_from(options: argparse.Namespace) -> Plan:
    folder = options.model or model.default_model(options.tp, say)
    return Plan(
        model=str(folder.resolve()),
        tensor_parallel=options.tp,
        num_prompts=options.prompts or (12 if options.quick else 24),
        max_new_tokens=32 if options.quick else 48,
        pool_blocks=options.pool_blocks or (48 if options.quick else 64),
        store_delay_ms=options.store_delay,
        trace_dir=str(options.trace.resolve()) if options.trace else None,
        **{name: getattr(options, name) for name in SAME_NAME},
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(error: str, cause: str, hint: str) -> Exit:
    say(f"\nerror: {error}\n  cause: {cause}\n\nhint: {hint}")
    return Exit.BROKEN


def main(arguments: list[str] | None = None) -> Exit:
    options = parse(arguments)
    from kvledger.errors import KvledgerError  # not before: --help needs no environment

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that children and store are ended then, too
    when_unread(sys.stderr.fileno(), lambda: os.kill(os.getpid(), signal.SIGTERM))  # whoever started this was killed
    folder = options.keep or Path(tempfile.mkdtemp(prefix="kvledger-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        plan = plan_from(options)
        plan.environment()
        values = Driver(plan, folder.resolve(), (options.reference or folder).resolve(), say).run()
    except KeyboardInterrupt:
        say("\ninterrupted: all processes have been ended")
        return Exit.INTERRUPTED
    except ChildError as problem:
        say(problem.tail)
        return fail(str(problem), "the lines above are the end of its log", "--keep DIR keeps all logs")
    except (model.ModelError, KvledgerError, TimeoutError, ValueError) as problem:
        return fail("the demo cannot run", str(problem), "./dev demo --help")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(values, indent=2) + "\n")
    print(f"\n{report.table(values)}\n")
    for fault in values["faults"]:
        say(f"wrong: {fault}")
    print("all of it holds" if values["ok"] else "something is wrong: see above")
    return Exit.OK if values["ok"] else Exit.WRONG_RESULT


if __name__ == "__main__":
    sys.exit(main())
