"""What a rank spends per block, beside the transfer itself: a store that answers at once and moves nothing."""

import contextlib

import torch

from bench.connectors import on_store
from bench.engine import BenchEngine, running
from bench.harness import IN_TREE, KVLEDGER, SIDES, Findings, Options, Row, Samples, alternating
from bench.scheduler import prompt_of
from bench.stores import NullStore, installed
from kvledger_conformance.engine import compat
from kvledger_conformance.store.master import MasterPort

BLOCK = 16
BLOCKS = 1024
"""Blocks of one prompt, which are one job."""
LAYERS = (32, 80)
CELL_FLOATS = 8  # 1 KiB a layer: staging copies little
MODES = ("direct", "staged")
"""kvledger's; on TCP it stages by default. The in-tree connector has one."""


def run(options: Options) -> Findings:
    """Rows for storing and loading, by layers and mode, and what a lookup costs per key."""
    torch.set_num_threads(1)
    found = Findings()
    lookup = Samples(Row("lookup CPU per key, hit", "µs", wanted="ratio ≥ 5"))
    for mode in MODES:
        for layers in LAYERS:
            title, wanted = (
                f"rank CPU per block, {layers} layers, kvledger {mode}",
                "ratio ≥ 4" if mode == "direct" else "",
            )
            store = Samples(Row(f"{title}: store", "µs", wanted=wanted))
            load = Samples(Row(f"{title}: load", "µs", wanted=wanted))
            _measure(mode, layers, options.repetitions(9, 3), store, load, lookup)
            found.measures.extend([store.measure(), load.measure()])
    found.measures.append(lookup.measure())
    return found


def _measure(mode: str, layers: int, repetitions: int, store: Samples, load: Samples, lookup: Samples) -> None:
    shape = compat.Shape(
        num_blocks=4 * BLOCKS,
        block_size=BLOCK,
        max_model_len=(BLOCKS + 1) * BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=(BLOCKS + 1) * BLOCK,
        layers=tuple(f"layer{i}" for i in range(layers)),
        cell_floats=CELL_FLOATS,
    )
    own: dict[str, dict[str, str]] = {IN_TREE: {}, KVLEDGER: {"transfer_mode": mode}}
    with (
        installed(NullStore),
        contextlib.closing(MasterPort()) as port,
        on_store(port.address),
        contextlib.ExitStack() as stack,
    ):
        engines = {side: stack.enter_context(running(side, shape, own[side])) for side in SIDES}
        for number, order in enumerate(alternating(repetitions + 1)):  # the first one only warms up
            for side in order:
                stored, _ = _serve(engines[side], 2 * number, holds=False)
                loaded, probed = _serve(engines[side], 2 * number + 1, holds=True)
                if number:
                    store.add(side, stored)
                    load.add(side, loaded)
                    lookup.add(side, probed)


def _serve(engine: BenchEngine, number: int, *, holds: bool) -> tuple[float, float]:
    """CPU µs of the rank and of the lookup, per block, for a prompt that is stored, or loaded because it is there."""
    NullStore.holds = holds
    prompt = prompt_of(number, BLOCKS * BLOCK + 1)
    before = engine.cpu()
    engine.add(prompt)
    engine.run()
    spent = engine.cpu() - before
    return 1e6 * spent.rank / BLOCKS, 1e6 * spent.lookups / BLOCKS
