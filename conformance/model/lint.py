"""What no single run shows: dead actions, properties that nobody checks, properties that kill nothing."""

import re

from conformance.model.manifest import Check
from conformance.tla import cfg, module, tlc
from conformance.tla.tlc import SPEC

# Properties that are not about the protocol: they keep the model's own bookkeeping straight and need no mutant.
NEEDS_NO_MUTANT = {"TypeOK"}


def properties() -> list[str]:
    """Names of the properties in MooncakeStoreProps.tla: those with a sentence above them that are not helpers."""
    text = (SPEC / "MooncakeStoreProps.tla").read_text(encoding="utf-8")
    return [
        name for name, _, _ in module.definitions(text) if name[0].isupper() and name not in {"Shared", "Unsettled"}
    ]


def actions() -> list[str]:
    """Names of the actions in MooncakeStore.tla, from their banners."""
    text = (SPEC / "MooncakeStore.tla").read_text(encoding="utf-8")
    banners = re.findall(r"^\(\* ACTION  (.+?)(?:  +WHO|\n)", text, re.M)
    return [name for banner in banners for name in re.findall(r"(\w+)(?:\([^)]*\))?(?: / |$)", banner.strip())]


def complaints(checks: list[Check], done: list[tuple[Check, tlc.Run, str]]) -> list[str]:
    """Everything that is not as it must be over the whole set."""
    said = []
    in_models = {n for c in checks if c.kind == "model" for n in _named(c)}
    killers = {c.property for c in checks if c.kind == "mutant"}
    for name in properties():
        if name not in in_models:
            said.append(f"property {name} is in no model")
        if name not in killers | NEEDS_NO_MUTANT:
            said.append(f"property {name} kills no mutant")
    taken = {action for _, run, _ in done for action, steps in run.actions.items() if steps}
    taken |= {action for check, run, _ in done if check.kind == "reach" for action, _ in run.trace}
    said += [f"action {name} is dead: no model takes it" for name in actions() if name not in taken]
    return said


def _named(check: Check) -> tuple[str, ...]:
    read = cfg.read(tlc.find(f"{check.base}.cfg"))
    return read.invariants + read.properties
