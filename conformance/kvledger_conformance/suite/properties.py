"""What every KV connector must keep, each with a name and one sentence, and how a breach is raised."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names of the properties are told where there is no vLLM, too
    from kvledger_conformance.engine.compat import Shape

PROPERTIES: dict[str, str] = {
    "blocks-held-during-dma": "No block that a transfer in flight reads or writes is free or has been given to anyone "
    "else.",
    "no-write-under-dma": "No forward writes into a block while a transfer reads or writes it.",
    "stored-bytes-right": "The bytes stored under a key are the KV of exactly the tokens that the key stands for.",
    "load-errors-complete": "What a load did not provably bring is reported before the request computes on it.",
    "computes-on-right-bytes": "No request computes on KV that is not its own prefix's.",
    "outputs-right": "Every request gets the tokens that its prompt leads to.",
    "references-exact": "A block has as many references as owners; back to none when the engine is idle.",
    "one-completion-per-load": "Each rank reports each load once: not twice, not never, not unasked.",
    "engine-alive": "No hook raises, whatever core may do in this order.",
    "goes-idle": "When the store answers, the engine goes idle within a bounded number of steps, and not before all "
    "references are back.",
    "bounded-pins": "While the store is silent, requests that need no store still finish.",
    "bounded-retries": "A load that keeps failing is not offered to the same request for ever.",
    "nothing-stale-after-reset": "After a successful reset of connector and cache nothing older is served.",
    "no-call-after-close": "The store's handle is not used after it was closed.",
    "refines-the-model": "kvledger only: its own state satisfies what the model proves (see `refinement`).",
}
CONTRACT = tuple(name for name in PROPERTIES if name != "refines-the-model")
"""The properties of the contract level, which every connector is held to."""


class Violation(AssertionError):
    """A property was broken. `story` tells how; `script` replays it on an engine of this `shape` (see `Driver.do`)."""

    shape: "Shape"

    def __init__(self, name: str, what: str) -> None:
        if name not in PROPERTIES:
            raise KeyError(f"unknown property {name!r}")
        super().__init__(f"{name}: {what}")
        self.name = name
        self.what = what
        self.script: list[dict[str, Any]] = []
        self.story = ""


class Impossible(Exception):
    """The action cannot happen in this state; a script that asks for it has been shortened too far."""


def require(possible: object, otherwise: str) -> None:
    """Raise `Impossible`, with the reason, unless an action is possible."""
    if not possible:
        raise Impossible(otherwise)
