"""Two-sided bugs: TLC's counterexample of each wrong model, replayed on kvledger and on kvledger with the same bug.

On the good code the replay must stop: kvledger refuses a step, does something else, or is not in the bad state at the end. On
the twin it must go through: after every step the code's state is the wrong model's, and at the end the bad state is reached.
"""

from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

from conformance.refinement import bad_states, counterexamples
from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.counterexamples import Counterexample
from conformance.refinement.state import KeyEpoch, differences, epoch_of_key, forget_views
from conformance.refinement.twins.in_adapter import LEDGER_PATCHES, OUT_OF_REACH
from conformance.refinement.world import Bounds, Divergence


@dataclass(frozen=True, slots=True)
class Outcome:
    """`step` of `of` states is where it stopped, with the action that leads there; `why` says how, or what is bad at the end."""

    through: bool
    step: int
    of: int
    action: str
    why: str


def _no_epoch(_epoch: int) -> int:
    return 0


def key_epoch(example: Counterexample) -> KeyEpoch:
    """Where the wrong model looks for an object."""
    return _no_epoch if "KeyWithoutEpoch" in example.replaces else epoch_of_key


def replay(example: Counterexample) -> Outcome:
    """Drive kvledger, as it is now, along the counterexample."""
    keys, of = key_epoch(example), len(example.steps)
    adapter = LedgerAdapter(example.steps[0][1], Bounds.read(example.cfg_text))
    pairs = zip(example.steps, example.steps[1:], strict=False)
    try:
        for number, ((_, before), (action, after)) in enumerate(pairs, start=2):
            try:
                adapter.do(action, before, after)
                wrong = differences(adapter, after, keys)
            except Divergence as divergence:
                wrong = [str(divergence)]
            if wrong:
                return Outcome(False, number, of, action, wrong[0])
        action, last = example.steps[-1]
        bad = bad_states.wrong(adapter, last, example.breaks)
        if bad:
            return Outcome(True, of, of, action, bad)
        return Outcome(False, of, of, example.ending or action, f"{example.breaks} holds in kvledger here")
    finally:
        forget_views()


def both(example: Counterexample) -> tuple[Outcome, Outcome]:
    """On the good code, and on its twin."""
    good = replay(example)
    with LEDGER_PATCHES[example.mutant]():
        return good, replay(example)


def rows(names: Container[str] | None = None) -> list[dict[str, Any]]:
    """Every mutant (or those named): both replays, or why there is none."""
    examples, out = counterexamples.load(), []
    for check in counterexamples.checks():
        name = check.name
        if names is not None and name not in names:
            continue
        row: dict[str, Any] = {"mutant": name, "property": check.property, "source": check.source}
        if name in examples and name in LEDGER_PATCHES:
            good, twin = both(examples[name])
            row |= {"good": asdict(good), "twin": asdict(twin), "ok": not good.through and twin.through}
        else:
            row |= {"good": None, "twin": None, "out_of_reach": OUT_OF_REACH.get(name, ""), "ok": name in OUT_OF_REACH}
        out.append(row)
    return out
