"""TLC's shortest counterexamples of the wrong versions of the model that are replayed, kept in `counterexamples.json`.

The file spares a run of TLC per mutant and test. It is kept true by two fingerprints per mutant: of its configuration, and of every
definition of the model that this makes use of (comments and layout do not count). A test refuses the file when any of them
is not today's, or when a mutant has come or gone; another lets TLC make some traces anew and compares.
"""

import hashlib
import json
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.model import manifest
from conformance.tla import cfg, tlc, value
from conformance.tla import module as tla_module
from conformance.tla.graph import GraphError, reached

FILE = Path(__file__).resolve().parent / "counterexamples.json"
TIMEOUT_S = 3600.0

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """`steps` holds (action, state) from the initial state on. `ending` tells how a behaviour without end goes on."""

    mutant: str
    breaks: str
    cfg_text: str
    steps: tuple[tuple[str, State], ...]
    ending: str = ""

    @property
    def replaces(self) -> dict[str, str]:
        """The wrong operators, each with the name of the right one."""
        return cfg.parse(self.cfg_text).replaced


def checks() -> list[manifest.Check]:
    """Every mutant of the registry."""
    return [c for c in manifest.load() if c.kind == "mutant"]


def digest(text: str) -> str:
    """A short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_fingerprint(module: str, cfg_text: str) -> str:
    """Over everything that a configuration makes use of: what it names, and what that is defined by, and so on."""
    known = tla_module.known(module)

    def named(text: str) -> set[str]:
        return known.keys() & set(re.findall(r"\w+", text))

    used = {*reached(named(cfg_text), lambda name: named(known[name])), *(n for n in known if " of " in n)}
    return digest("\n".join(f"{n}: {known[n]}" for n in sorted(used)))


def make(check: manifest.Check) -> dict[str, Any]:
    """Let TLC find it.

    Raises:
        GraphError: TLC finds no counterexample of this property.
    """
    run = tlc.check(check.module, check.cfg_text(), timeout_s=TIMEOUT_S)
    if run.result not in ("invariant", "property") or not run.trace:
        raise GraphError(f"mutant {check.name}: TLC says {run.result}\n{run.output[-1500:]}")
    steps: list[dict[str, Any]] = []
    last: dict[str, str] = {}
    for action, text in run.trace:
        values = value.variables(text)
        steps.append({"action": action, "set": {n: v for n, v in values.items() if last.get(n) != v}})
        last = {**last, **values}
    return {"property": check.property, **marks(check), "steps": steps}


def marks(check: manifest.Check) -> dict[str, str]:
    """What tells whether a kept counterexample is today's."""
    text = check.cfg_text()
    return {"cfg": digest(text), "model": model_fingerprint(check.module, text)}


def _kept() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def stale(names: Container[str]) -> list[str]:
    """Why the file does not hold today's counterexamples of these mutants, and no others; empty if it does."""
    kept, today = _kept(), {c.name: c for c in checks() if c.name in names}
    wrong = [f"mutant {name} is kept, and is not replayed any more" for name in kept if name not in today]
    for name, check in today.items():
        entry, now = kept.get(name), marks(check)
        if entry is None:
            wrong.append(f"mutant {name} has no counterexample")
        elif entry["cfg"] != now["cfg"]:
            wrong.append(f"mutant {name} has another configuration")
        elif entry["model"] != now["model"]:
            wrong.append(f"mutant {name}: what it uses of the model has changed")
    return wrong


def lock(names: Container[str], *, say: Callable[[str], None]) -> None:
    """Make what is stale anew, one run of TLC after the other."""
    kept, today = _kept(), [c for c in checks() if c.name in names]
    fresh = {c.name: kept[c.name] for c in today if marks(c).items() <= kept.get(c.name, {}).items()}
    for check in today:
        if check.name not in fresh:
            fresh[check.name] = entry = make(check)
            say(f"{check.name}: {len(entry['steps'])} states to {entry['property']}")
            _write({c.name: fresh[c.name] for c in today if c.name in fresh})
    _write({c.name: fresh[c.name] for c in today})


def _write(mutants: dict[str, Any]) -> None:
    FILE.write_text("{\n" + ",\n".join(f"  {json.dumps(n)}: {_entry(e)}" for n, e in mutants.items()) + "\n}\n")


def _entry(entry: dict[str, Any]) -> str:
    head = json.dumps({k: v for k, v in entry.items() if k != "steps"})[:-1]
    return head + ', "steps": [\n' + ",\n".join(f"    {json.dumps(s)}" for s in entry["steps"]) + "\n  ]}"


def load() -> dict[str, Counterexample]:
    """All of them, by mutant."""
    configurations = {c.name: c.cfg_text() for c in checks()}
    return {n: read(n, entry, configurations[n]) for n, entry in _kept().items() if n in configurations}


def read(name: str, entry: dict[str, Any], cfg_text: str) -> Counterexample:
    """One of them. Actions get the names that the model gives them."""
    names, ending = cfg.parse(cfg_text).replaced, ""
    values: State = {}
    steps: list[tuple[str, State]] = []
    for step in entry["steps"]:
        if (not step["set"] and not re.fullmatch(r"\w+", step["action"])) or step["action"] == "Stuttering":
            ending = step["action"]
            continue
        values = {**values, **{n: value.parse(v) for n, v in step["set"].items()}}
        steps.append((names.get(step["action"], step["action"]), values))
    return Counterexample(name, entry["property"], cfg_text, tuple(steps), ending)
