"""What a connector costs when many requests arrive in one step, and in the decode steps after it."""

from bench.connectors import on_store
from bench.harness import Findings, Options, Row, Samples, alternating
from bench.scheduler import BenchScheduler, prompt_of
from kvledger_conformance.engine import compat

BLOCK = 16
PROMPT_TOKENS = 512
STEPS_AFTER = 8
"""Decode steps after the burst that are counted with it."""
REQUESTS = (1000, 100)


def run(options: Options) -> Findings:
    """Rows for 1,000 and 100 requests."""
    found = Findings()
    with on_store():
        for number in REQUESTS:
            found.measures.extend(sample.measure() for sample in _measure(number, options.repetitions(9, 2)))
    return found


def _measure(number: int, repetitions: int) -> list[Samples]:
    title = f"{number:,} new requests of {PROMPT_TOKENS} tokens in one step"
    after = f"the {STEPS_AFTER} decode steps after {number:,} new requests"
    build = Samples(Row(f"{title}: build", "ms", wanted="ratio ≥ 3"))
    total = Samples(Row(f"{title}: scheduler CPU", "ms", wanted="ratio ≥ 3"))
    total_after = Samples(Row(f"{after}: scheduler CPU", "ms", wanted="ratio ≥ 3"))
    size = Samples(Row(f"{title}: metadata", "bytes", wanted="ratio ≥ 10"))
    size_after = Samples(Row(f"{after}: metadata", "bytes", wanted="ratio ≥ 10"))
    shape = compat.Shape(
        num_blocks=number * (PROMPT_TOKENS // BLOCK + 2) + 1,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_seqs=number,
        max_num_batched_tokens=number * PROMPT_TOKENS,
    )
    for order in alternating(repetitions):
        for side in order:
            scheduler = BenchScheduler(side, shape)
            try:
                for i in range(number):
                    scheduler.add(str(i), prompt_of(i, PROMPT_TOKENS), STEPS_AFTER + 2)
                first = scheduler.step()
                rest = [scheduler.step() for _ in range(STEPS_AFTER)]
            finally:
                scheduler.close()
            build.add(side, 1e3 * first.build_s)
            total.add(side, 1e3 * first.total_s)
            size.add(side, first.metadata_bytes)
            total_after.add(side, 1e3 * sum(step.total_s for step in rest))
            size_after.add(side, sum(step.metadata_bytes for step in rest))
    return [build, total, total_after, size, size_after]
