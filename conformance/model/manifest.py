"""What is to be checked and what must come out: `manifest.toml`, `mutants/registry.toml` and `counts.json`."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.tla import cfg, module
from conformance.tla.tlc import SPEC, find

COUNTS = SPEC / "counts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One run of TLC. `expected`: `pass`; `violated`, by `property`; `assumption`, a false one is found; or `either`."""

    name: str
    kind: str  # model, reach, canary, mutant
    module: str
    base: str
    expected: str = "pass"
    property: str = ""
    constants: dict[str, str] = field(default_factory=dict)
    specification: str = ""
    deep: bool = False
    coverage: bool = False
    bounds: str = ""
    source: str = ""
    mechanism: str = ""
    temporal: bool = False
    shortest: bool = True
    """Whether TLC's counterexample is the shortest one, and so the same each time; not for what happens in the end."""

    def config(self) -> cfg.Cfg:
        """The configuration: the base file, with this check's replacements and, if it must fail, its one property."""
        base = cfg.read(find(f"{self.base}.cfg"))
        if self.kind == "model":
            return base.changed(self.constants)
        invariants, properties = ((), (self.property,)) if self.temporal else ((self.property,), ())
        return base.changed(
            self.constants, specification=self.specification, invariants=invariants, properties=properties
        )

    def cfg_text(self) -> str:
        """The configuration's text."""
        return self.config().text()


def temporal_names() -> frozenset[str]:
    """Names that TLC must be given as PROPERTIES: their definition holds a temporal operator."""
    return _defined_with("[]", "<>", "~>") | {"Refines"}


def liveness_names() -> frozenset[str]:
    """Names of properties that say what happens in the end."""
    return _defined_with("<>", "~>")


def _defined_with(*operators: str) -> frozenset[str]:
    texts = [(SPEC / file).read_text(encoding="utf-8") for file in ("MooncakeStoreProps.tla", "MC.tla")]
    found = [(name, part.replace("<<>>", "")) for text in texts for name, _, part in module.definitions(text)]
    return frozenset(name for name, part in found if any(operator in part for operator in operators))


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load() -> list[Check]:
    """Every check, in the order of the files."""
    manifest, registry = _toml(SPEC / "manifest.toml"), _toml(SPEC / "mutants" / "registry.toml")
    temporal, liveness = temporal_names(), liveness_names()
    checks = [
        Check(
            name=m["name"], kind="model", module=m.get("module", "MC"), base=m["name"],
            bounds=m["bounds"], deep=m.get("deep", False), coverage=m.get("coverage", False),
        )
        for m in manifest["model"]
    ]  # fmt: skip
    checks += [
        Check(
            name=f"MCReach_{r['name']}", kind="reach", module="MC", base=r["base"], expected="violated",
            property=f"Never_{r['name']}", constants=r.get("set", {}), bounds=f"as {r['base']}",
            temporal=f"Never_{r['name']}" in temporal, shortest=f"Never_{r['name']}" not in liveness,
            mechanism=r["fact"], specification="Spec",
            deep=r.get("deep", False),
        )
        for r in manifest["reach"]
    ]  # fmt: skip
    checks += [
        Check(
            name=f"Canary_{c['name']}", kind="canary", module="Canary", base="Canary", property=c["property"],
            expected=c.get("expected", "violated"), constants=c.get("set", {}), temporal=c.get("temporal", False),
            shortest=not c.get("temporal", False),
            bounds="as Canary", mechanism=c.get("fact", ""),
        )
        for c in manifest["canary"]
    ]  # fmt: skip
    checks += [
        Check(
            name=m["id"], kind="mutant", module=m.get("module", "MCMutants"), base=m["base"], expected="violated",
            property=m["property"], constants=m["set"], bounds=f"as {m['base']}",
            temporal=m["property"] in temporal, shortest=m["property"] not in liveness,
            source=m["source"], mechanism=m["mechanism"],
            specification=m.get("specification", ""), deep=m.get("deep", False),
        )
        for m in registry["mutant"]
    ]  # fmt: skip
    return checks


def counts() -> dict[str, dict[str, int]]:
    """Recorded figures per check: distinct states and depth, or the length of the shortest trace."""
    return json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}


def record(figures: dict[str, dict[str, int]]) -> None:
    """Write figures over the recorded ones (after a deliberate change of the model); empty ones are left out."""
    merged = {name: found for name, found in {**counts(), **figures}.items() if found}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(merged.items())]
    COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
