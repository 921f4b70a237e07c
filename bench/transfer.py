"""How many bytes a second reach a store in another process over TCP, and come back, by segments per object."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.connectors import on_store
from bench.engine import BenchEngine, running
from bench.harness import IN_TREE, KVLEDGER, RAW, SIDES, Curve, Findings, Options, Row, Samples, alternating
from bench.scheduler import prompt_of
from kvledger.mooncake.embedded import running_embedded
from kvledger_conformance.engine import compat

BLOCK = 16
OBJECT_BYTES = 1 << 20
FLOAT_PAIR_BYTES = 8
BLOCKS = 128
"""Objects of one repetition."""
SEGMENTS_PER_PROMPT = 1024
"""The in-tree connector moves a prompt in one call, and a call of more than about 2,048 segments fails on TCP."""
SEGMENTS = (1, 4, 32, 128)
QUICK_SEGMENTS = (1, 32)
JUDGED = 32
"""As many layers as an 8B model has; the rows with a goal are of this number."""
STORE_BYTES = 2 << 30


def run(options: Options) -> Findings:
    """Rows for 32 segments, put and get, and the curves by segments."""
    torch.set_num_threads(1)
    found = Findings()
    numbers = QUICK_SEGMENTS if options.quick else SEGMENTS
    series: dict[str, dict[str, list[float]]] = {
        operation: {side: [] for side in (IN_TREE, KVLEDGER, RAW)} for operation in ("put", "get")
    }
    raw_of_one: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
        running_embedded(folder, STORE_BYTES) as store,
        on_store(store.master_address),
        _raw_client(store.master_address) as raw,
    ):
        for segments in numbers:
            options.say(f"  {segments} segments per object")
            samples = _measure(raw, segments, options.repetitions(7))
            for operation, sample in samples.items():
                for side in series[operation]:
                    series[operation][side].append(sample.median(side) or 0.0)
                raw_of_one.setdefault(operation, sample.median(RAW) or 0.0)
                if segments == JUDGED:
                    found.measures.append(sample.measure())
                    found.measures.append(_beside_one_segment(sample, raw_of_one[operation]))
    for operation, of in series.items():
        found.curves.append(
            Curve(
                name=f"goodput-{operation}",
                x_name="segments per object of 1 MiB",
                y_name=f"{operation}, GB/s over loopback TCP",
                x=list(map(float, numbers)),
                series=of,
                log_x=True,
            )
        )
    return found


def _measure(raw: Any, segments: int, repetitions: int) -> dict[str, Samples]:
    blocks = min(BLOCKS // 4, SEGMENTS_PER_PROMPT // segments)
    title = f"1 MiB objects of {segments} segments over TCP"
    samples = {
        operation: Samples(Row(f"{operation}, {title}", "GB/s", better="higher", wanted="ratio ≥ 1.6"))
        for operation in ("put", "get")
    }
    shape = compat.Shape(
        num_blocks=3 * BLOCKS,
        block_size=BLOCK,
        max_model_len=(BLOCKS + 1) * BLOCK,
        max_num_seqs=BLOCKS // blocks,
        max_num_batched_tokens=2 * BLOCKS * BLOCK,
        layers=tuple(f"layer{i}" for i in range(segments)),
        cell_floats=OBJECT_BYTES // segments // BLOCK // FLOAT_PAIR_BYTES,
    )
    memory = torch.rand(segments, BLOCKS, OBJECT_BYTES // segments // 4)
    with contextlib.ExitStack() as stack:
        raw.register_buffer(memory.data_ptr(), memory.nbytes)
        stack.callback(raw.unregister_buffer, memory.data_ptr())
        engines = {side: stack.enter_context(running(side, shape)) for side in SIDES}
        for number, order in enumerate(alternating(repetitions + 1)):  # the first one only warms up
            rates = {side: _serve(engines[side], number, blocks) for side in order}
            rates[RAW] = _raw(raw, memory, number, blocks)
            for side, (put, get) in rates.items():
                if number:
                    samples["put"].add(side, put)
                    samples["get"].add(side, get)
            raw.remove_all(True)
    return samples


def _beside_one_segment(sample: Samples, raw: float) -> Any:
    """The same figures against a raw call for objects in one piece: what a connector that merges segments could reach."""
    row = Row(f"{sample.row.name}; raw: in one segment", "GB/s", better="higher", wanted="kvledger/raw ≥ 0.9")
    beside = Samples(row)
    for side in SIDES:
        beside.add(side, sample.median(side) or 0.0)
    beside.add(RAW, raw)
    return beside.measure()


def _serve(engine: BenchEngine, number: int, blocks: int) -> tuple[float, float]:
    """GB/s of storing prompts of so many blocks, and of loading them again into an engine that has forgotten them."""
    count = BLOCKS // blocks
    prompts = [prompt_of(number * count + i, blocks * BLOCK + 1) for i in range(count)]

    def serve() -> None:
        for prompt in prompts:
            engine.add(prompt)
        engine.run()

    put = _rate(serve)
    engine.forget()
    before = engine.external_tokens
    get = _rate(serve)
    engine.forget()
    if engine.external_tokens - before != BLOCKS * BLOCK:
        raise RuntimeError(f"{engine.side} loaded {engine.external_tokens - before} of {BLOCKS * BLOCK} tokens")
    return put, get


def _rate(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return BLOCKS * OBJECT_BYTES / (time.perf_counter() - begin) / 1e9


@contextlib.contextmanager
def _raw_client(address: str) -> Iterator[Any]:
    """Mooncake's own client, without a connector, and memory registered with it."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if code := client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address):
        raise RuntimeError(f"Mooncake's setup at {address} answered {code}")
    try:
        yield client
    finally:
        client.close()


def _raw(client: Any, memory: torch.Tensor, number: int, step: int) -> tuple[float, float]:
    """GB/s of as many objects in as many segments, by nothing but Mooncake's calls, each of `step` objects."""
    from mooncake.store import ReplicateConfig

    segments, size = memory.shape[0], OBJECT_BYTES // memory.shape[0]
    keys = [f"raw-{number}-{i}" for i in range(BLOCKS)]
    addresses = [[memory[s, i].data_ptr() for s in range(segments)] for i in range(BLOCKS)]
    sizes = [[size] * segments] * BLOCKS
    slices = [slice(i, i + step) for i in range(0, BLOCKS, step)]

    def put() -> None:
        for s in slices:
            _expect(client.batch_put_from_multi_buffers(keys[s], addresses[s], sizes[s], ReplicateConfig()), 0)

    def get() -> None:
        for s in slices:
            _expect(client.batch_get_into_multi_buffers(keys[s], addresses[s], sizes[s]), OBJECT_BYTES)

    return _rate(put), _rate(get)


def _expect(answers: list[int], wanted: int) -> None:
    if any(answer != wanted for answer in answers):
        raise RuntimeError(f"Mooncake answered {sorted(set(answers))} where {wanted} was due")
