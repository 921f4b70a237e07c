"""Generated mutants: one guard conjunct dropped, or one update dropped, in MooncakeStore.tla or MooncakeStoreLedger.tla.

A mutant is killed when a property of one of the models below fails, or TLC cannot evaluate it, or something that the
model must be able to do is not reached any more. A survivor must be listed with a reason in mutants/survivors.toml.
"""

import hashlib
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.model import lint, manifest
from conformance.tla import cfg, module, tlc
from conformance.tla.graph import reached
from conformance.tla.tlc import SPEC, find

SURVIVORS = SPEC / "mutants" / "survivors.toml"
FILES = ("MooncakeStore.tla", "MooncakeStoreLedger.tla")
_TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOT_FORMULAS = frozenset(_TOLD["not_formulas"])
MODELS: list[dict[str, Any]] = _TOLD["model"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `old` at `start` in `file` becomes `new`."""

    name: str
    file: str
    start: int
    old: str
    new: str

    @property
    def operator(self) -> str:
        """The definition that was changed."""
        return self.name.partition(".")[0]

    def text(self) -> str:
        """The changed module."""
        text = (SPEC / self.file).read_text(encoding="utf-8")
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def _conjuncts(body: str) -> Iterator[tuple[int, str]]:
    """The conjuncts of a body: bullets at its least indentation, or the parts of a one-line body."""
    bullets = list(re.finditer(r"^( *)/\\ ", body, re.M))
    if bullets:
        least = min(len(b[1]) for b in bullets)
        mine = [b for b in bullets if len(b[1]) == least]
        for bullet, following in zip(mine, [*mine[1:], None], strict=True):
            chunk = body[bullet.end() : following.start() if following else len(body)]
            lines = chunk.split("\n")
            keep = [lines[0]]
            for line in lines[1:]:
                if line.strip() and len(line) - len(line.lstrip()) <= least:
                    break
                keep.append(line)
            yield from _inline(bullet.end(), "\n".join(keep).rstrip())
    elif "\n" not in body.strip() and "IF " not in body and "{" not in body:
        lead = len(body) - len(body.lstrip())
        yield from _inline(lead, body.strip())


def _inline(start: int, text: str) -> Iterator[tuple[int, str]]:
    """Split at /\\ outside brackets, on one line and outside quantifiers, disjunctions and implications."""
    if "\n" in text or re.search(r"\\A|\\E|\\/|=>|\bIF\b|\bLET\b", text):
        yield start, text
        return
    depth, last = 0, 0
    for match in re.finditer(r"<<|>>|[(\[{]|[)\]}]|/\\", text):
        token = match[0]
        depth += token in {"<<", "(", "[", "{"}
        depth -= token in {">>", ")", "]", "}"}
        if token == "/\\" and depth == 0:
            yield start + last, text[last : match.start()].rstrip()
            last = match.end() + 1
    yield start + last, text[last:].rstrip()


def generate() -> list[Mutant]:
    """All generated mutants, named FILE-part.Operator.number."""
    out: list[Mutant] = []
    for file in FILES:
        text = (SPEC / file).read_text(encoding="utf-8")
        for name, start, definition in module.definitions(text):
            if name.endswith("Next") or name in NOT_FORMULAS or not name[0].isupper() or name.isupper():
                continue
            at = start + definition.index("==") + 2
            body = definition[at - start :]
            for number, (offset, conjunct) in enumerate(_conjuncts(body), start=1):
                update = re.match(r"(\w+)' = ", conjunct)
                if not conjunct.strip() or conjunct.startswith("UNCHANGED"):
                    continue
                if update:
                    new, kind = f"{update[1]}' = {update[1]}", "update"
                elif "'" in conjunct or re.match(
                    r"(BuildMeta|Push|Send|Set|Gone|Unadmit|ToWaiting|Admit|LET)\b", conjunct
                ):
                    continue
                else:
                    new, kind = "TRUE", "guard"
                pad = "\n" * conjunct.count("\n")
                out.append(Mutant(f"{name}.{number}-{kind}", file, at + offset, conjunct, new + pad))
    return out


def survivors() -> dict[str, str]:
    """Reasons by mutant name."""
    return {s["id"]: s["reason"] for s in tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))["survivor"]}


def _uses() -> dict[str, set[str]]:
    """For each operator of the model, which others its body names."""
    bodies: dict[str, str] = {}
    for file in (*FILES, "MooncakeStoreTypes.tla", "MooncakeStoreProps.tla", "MC.tla"):
        text = (SPEC / file).read_text(encoding="utf-8")
        bodies |= {name: definition.partition("==")[2] for name, _, definition in module.definitions(text)}
    words = {name: set(re.findall(r"\b[A-Z]\w*", body)) for name, body in bodies.items()}
    return {name: found & bodies.keys() for name, found in words.items()}


def concerns(mutant: Mutant, config: cfg.Cfg) -> bool:
    """Whether a model with this configuration can tell: it evaluates the operator, and what was changed can matter."""
    constants = config.constants
    gone = {name for name, value in constants.items() if value.startswith("<-")}
    if constants["SyncLoads"] != "<- Async":
        gone.add("AdmitLoad")
    if constants["SyncLoads"] != "<- Sync":
        gone.add("AdmitSyncLoad")
    if constants["MaxEpoch"] == "= 0":
        gone.add("Reset")
    if "BecomeCalm" in gone and mutant.old == "~calm":
        return False
    frozen = {"calm": "BecomeCalm" in gone, "stalled": "StallTimeout" in gone, "epoch": "Reset" in gone}
    frozen["nohit"] = constants["SyncLoads"] == "<- NoLoads"
    if mutant.name.endswith("-update") and frozen.get(mutant.old.partition("'")[0]):
        return False
    if constants["Reqs"] == "= {1}" and mutant.old in {"owed = 0", r"owed \in {0, r}"}:
        return False
    uses, named = _uses(), {*lint.actions(), *config.invariants, *config.properties}
    return mutant.operator in reached(named - gone, lambda name: uses.get(name, set()) - gone)


def try_one(mutant: Mutant, timeout_s: float = 600.0) -> tuple[str, str]:
    """(model, what failed) of the model that killed the mutant, or ("", "") if none did.

    One that only takes behaviour away breaks no safety property: it is killed when a reachability check finds nothing.
    """
    with tempfile.TemporaryDirectory(prefix="kvledger-mutant-") as scratch:
        folder = Path(scratch)
        for file in SPEC.glob("*.tla"):
            shutil.copy(file, folder / file.name)
        (folder / mutant.file).write_text(mutant.text(), encoding="utf-8")
        for model in MODELS:
            config = cfg.read(find(f"{model['name']}.cfg")).changed(model.get("set", {}))
            if not concerns(mutant, config) or mutant.operator not in model.get("only_for", (mutant.operator,)):
                continue
            run = tlc.check("MC", config.text(), timeout_s=timeout_s, short=True, folder=folder)
            if run.result in {"parse error", "config error"}:
                return model["name"], "NOT A MODULE"
            if run.result != "pass":
                return model["name"], run.property or run.result
        if mutant.name.endswith("-guard") and mutant.operator in lint.actions():
            return "", ""  # an action with a guard less can do all that it could
        for check in (c for c in manifest.load() if c.kind == "reach" and not c.deep):
            if concerns(mutant, check.config()):
                run = tlc.check("MC", check.cfg_text(), timeout_s=timeout_s, short=True, folder=folder)
                if run.result == "pass":
                    return check.base, f"{check.name}, which is not reached any more"
    return "", ""


def _digest() -> str:
    """Hash of all that a result depends on: the modules, the configurations and the list of models."""
    files = [*sorted(SPEC.glob("MooncakeStore*.tla")), SPEC / "MC.tla", *(find(f"{m['name']}.cfg") for m in MODELS)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files) + repr(MODELS).encode()).hexdigest()[:16]


def remember(file: Path, mutant: Mutant, fate: tuple[str, str]) -> None:
    """Append one result to `file`."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"text": _digest(), "id": mutant.name, "fate": fate}) + "\n")


def recall(file: Path) -> dict[str, tuple[str, str]]:
    """Results in `file` that are about the text as it is now."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {r["id"]: (r["fate"][0], r["fate"][1]) for r in found if r["text"] == _digest()}
