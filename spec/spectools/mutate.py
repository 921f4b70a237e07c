"""Generated mutants: one guard conjunct dropped, or one update dropped, in MooncakeStore.tla or MooncakeStoreLedger.tla.

A mutant is killed when a property of one of the models below fails, or TLC cannot evaluate it. A survivor must be
listed with a reason in mutants/survivors.toml.
"""

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spectools import cfg, tlc
from spectools.manifest import SPEC

SURVIVORS = SPEC / "mutants" / "survivors.toml"
FILES = ("MooncakeStore.tla", "MooncakeStoreLedger.tla")
# Small models that together reach every action; a mutant goes through them until one kills it.
MODELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("MC", {"MaxJob": "= 1"}),
    ("MCReset", {}),
    ("MCLoad", {"RankExpire": "<- FALSE", "RankDrop": "<- FALSE"}),
    ("MCPipe", {"PartSteps": "<- FullSteps"}),
    ("MCPrefix", {}),
    ("MCSync", {"MaxJob": "= 1"}),
    ("MCRanks", {"RankQuarantine": "<- FALSE", "RankDrop": "<- FALSE", "Refusals": "<- NoRefusal"}),
    ("MCLive", {"MaxJob": "= 1"}),
)


# Definitions that are values, not formulas, or hooks for narrow models: there is no conjunct to drop.
NOT_FORMULAS = frozenset(
    [
        "Spec",
        "Allocatable",
        "Index",
        "MayIdle",
        "NoPrompt",
        "Wiped",
        "LastIdx",
        "Shift",
        "PollOrder",
        "ReportedBad",
        "Key",
        "AfterEmit",
        "Count",
        "NewRetry",
    ]
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `old` at `start` in `file` becomes `new`."""

    name: str
    file: str
    start: int
    old: str
    new: str

    def text(self) -> str:
        """The changed module."""
        text = (SPEC / self.file).read_text(encoding="utf-8")
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def _definitions(text: str) -> Iterator[tuple[str, int, str]]:
    """Name, position and body of each operator definition at the left margin."""
    heads = list(re.finditer(r"^([A-Z]\w*)(?:\([^)=]*\))? ==", text, re.M))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        end = following.start() if following else len(text)
        comment = text.find("\n(*", head.end(), end)
        ruler = text.find("\n----", head.end(), end)
        end = min(x for x in (end, comment, ruler) if x != -1)
        yield head[1], head.end(), text[head.end() : end]


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
    code = re.sub(r"\\\*[^\n]*", lambda m: " " * len(m[0]), text)
    if "\n" in text or re.search(r"\\A|\\E|\\/|=>|\bIF\b|\bLET\b", code):
        yield start, text
        return
    depth, last = 0, 0
    for match in re.finditer(r"<<|>>|[(\[{]|[)\]}]|/\\", code):
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
        for name, at, body in _definitions(text):
            if name.endswith("Next") or name in NOT_FORMULAS:
                continue
            for number, (offset, raw) in enumerate(_conjuncts(body), start=1):
                conjunct = re.sub(r"\s*\\\*[^\n]*$", "", raw)
                update = re.match(r"(\w+)' = ", conjunct)
                if not conjunct.strip() or conjunct.startswith("UNCHANGED"):
                    continue
                if update:
                    new, kind = f"{update[1]}' = {update[1]}", "update"
                elif "'" in conjunct or re.match(
                    r"(BuildMeta|Push|Send|Set|Gone|Unadmit|ToWaiting|Admit|Relearn|LET)\b", conjunct
                ):
                    continue
                else:
                    new, kind = "TRUE", "guard"
                pad = "\n" * conjunct.count("\n")
                out.append(Mutant(f"{name}.{number}-{kind}", file, at + offset, conjunct, new + pad))
    return out


def survivors() -> dict[str, str]:
    """Reasons by mutant name."""
    if not SURVIVORS.exists():
        return {}
    return {s["id"]: s["reason"] for s in tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))["survivor"]}


def try_one(mutant: Mutant, timeout_s: float = 600.0) -> tuple[str, str]:
    """(model, what failed) of the model that killed the mutant, or ("", "") if none did."""
    with tempfile.TemporaryDirectory(prefix="kvledger-mutant-") as scratch:
        folder = Path(scratch)
        for file in SPEC.glob("*.tla"):
            shutil.copy(file, folder / file.name)
        (folder / mutant.file).write_text(mutant.text(), encoding="utf-8")
        for model, changes in MODELS:
            text = cfg.read(SPEC / f"{model}.cfg").changed(changes).text()
            run = tlc.check("MC", text, timeout_s=timeout_s, folder=folder)
            if run.result in {"parse error", "config error"}:
                return model, "NOT A MODULE"
            if run.result != "pass":
                return model, run.property or run.result
    return "", ""
