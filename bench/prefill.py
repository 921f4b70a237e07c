"""What a connector costs while one prompt of 128k tokens is computed and stored, chunk by chunk."""

import statistics

from bench.connectors import on_store
from bench.harness import SIDES, Curve, Findings, Options, Row, Samples, alternating
from bench.scheduler import BenchScheduler, StepCost, prompt_of
from kvledger_conformance.engine import compat

BLOCK = 16
CHUNK = 2048
TOKENS = 128 * 1024
TAIL_STEPS = 2
"""Decode steps after the prompt, in which the last reports arrive."""
REPORTED = {"next step": True, "never": False}


def run(options: Options) -> Findings:
    """Rows with reports in the next step and with none at all, and the curve by context."""
    found = Findings()
    per_step: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    shape = compat.Shape(
        num_blocks=3 * TOKENS // BLOCK,  # so that a limit on held blocks is not what is measured
        block_size=BLOCK,
        max_model_len=TOKENS + CHUNK,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
    )
    with on_store():
        for when, report in REPORTED.items():
            total = Samples(Row(f"scheduler CPU, prefill to 128k, reports {when}", "ms", wanted="ratio ≥ 8"))
            size = Samples(Row(f"metadata of a prefill to 128k, reports {when}", "bytes", wanted="ratio ≥ 60"))
            for order in alternating(options.repetitions(7)):
                for side in order:
                    costs = _prefill(side, shape, report=report)
                    total.add(side, 1e3 * sum(cost.total_s for cost in costs))
                    size.add(side, max(cost.metadata_bytes for cost in costs))
                    if report:
                        per_step[side].append([1e3 * cost.total_s for cost in costs])
            found.measures.extend([total.measure(), size.measure()])
    steps = TOKENS // CHUNK
    found.curves.append(
        Curve(
            name="cost-by-context",
            x_name="tokens computed before the step",
            y_name=f"scheduler CPU of a step of {CHUNK:,} tokens, ms",
            x=[float(CHUNK * i) for i in range(steps)],
            series={
                side: [statistics.median(run[i] for run in runs) for i in range(steps)]
                for side, runs in per_step.items()
            },
        )
    )
    return found


def _prefill(side: str, shape: compat.Shape, *, report: bool) -> list[StepCost]:
    scheduler = BenchScheduler(side, shape)
    try:
        scheduler.add("prompt", prompt_of(1, TOKENS), TAIL_STEPS + 1)
        return [scheduler.step(report=report) for _ in range(TOKENS // CHUNK + TAIL_STEPS)]
    finally:
        scheduler.close()
