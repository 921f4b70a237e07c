"""What a connector costs a decode step in which nothing has to be stored, by number of running requests."""

import statistics

from bench.connectors import on_store
from bench.harness import SIDES, Curve, Findings, Options, Row, Samples, alternating
from bench.scheduler import BenchScheduler, prompt_of
from kvledger_conformance.engine import compat

BLOCK = 32
PROMPT_TOKENS = 3 * BLOCK
SETTLE_STEPS = 16
"""The prefill, and the steps over which its stores are spread."""
STEPS = 20
"""Decode steps of one repetition; their median counts."""
MAX_STEPS = 800
REQUESTS = (64, 128, 256, 512, 1024)
WANTED = {512: "ratio ≥ 50", 1024: "ratio ≥ 50"}


def run(options: Options) -> Findings:
    """Rows for 512 and 1,024 requests, and the curve over all numbers."""
    numbers = REQUESTS[1::2] if options.quick else REQUESTS
    found = Findings()
    series: dict[str, list[float]] = {side: [] for side in SIDES}
    with on_store():
        for number in numbers:
            cost, size = _measure(number, options.repetitions(9, 3))
            for side in SIDES:
                series[side].append(cost.median(side) or 0.0)
            if number in WANTED:
                found.measures.extend([cost.measure(), size.measure()])
    found.curves.append(
        Curve(
            name="cost-by-requests",
            x_name="running requests",
            y_name="scheduler CPU of an idle decode step, ms",
            x=list(map(float, numbers)),
            series=series,
            log_x=True,
            log_y=True,
        )
    )
    return found


def _measure(number: int, repetitions: int) -> tuple[Samples, Samples]:
    cost = Samples(Row(f"scheduler CPU per step, {number:,} idle decodes", "ms", wanted=WANTED.get(number, "")))
    size = Samples(Row(f"metadata of a step, {number:,} idle decodes", "bytes"))
    shape = compat.Shape(
        num_blocks=number * (PROMPT_TOKENS + MAX_STEPS) // BLOCK + number + 1,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_seqs=number,
        max_num_batched_tokens=max(4096, number * PROMPT_TOKENS),
    )
    schedulers = {side: BenchScheduler(side, shape) for side in SIDES}
    try:
        for scheduler in schedulers.values():
            for i in range(number):
                scheduler.add(str(i), prompt_of(i, PROMPT_TOKENS), MAX_STEPS)
            for _ in range(SETTLE_STEPS):
                scheduler.step()
        for order in alternating(repetitions):
            for side in order:
                steps = [schedulers[side].step() for _ in range(STEPS)]
                cost.add(side, 1e3 * statistics.median(step.total_s for step in steps))
                size.add(side, statistics.median(step.metadata_bytes for step in steps))
    finally:
        for scheduler in schedulers.values():
            scheduler.close()
    return cost, size
