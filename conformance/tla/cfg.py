"""TLC configuration files: read one, change it, write it. Only the layout used in this folder is understood.

One constant per line below CONSTANTS, one name per line below INVARIANTS and PROPERTIES.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

SECTIONS = ("SPECIFICATION", "INIT", "NEXT", "CONSTANTS", "INVARIANTS", "PROPERTIES", "CONSTRAINT", "VIEW", "SYMMETRY")


class CfgError(ValueError):
    """A configuration file that is not laid out as this project does it."""


@dataclass(frozen=True, slots=True)
class Cfg:
    """One configuration. `constants` maps a name to `= value` or `<- operator`."""

    single: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    invariants: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()

    @property
    def replaced(self) -> dict[str, str]:
        """Operators that stand in the place of others, each with the name of the one that it stands for."""
        operators = {v.removeprefix("<- "): n for n, v in self.constants.items() if v.startswith("<- ")}
        return {operator: n for operator, n in operators.items() if operator not in ("TRUE", "FALSE")}

    def changed(
        self,
        constants: Mapping[str, str],
        *,
        specification: str = "",
        invariants: Sequence[str] | None = None,
        properties: Sequence[str] | None = None,
    ) -> "Cfg":
        """A copy with other constants (an empty value removes one) and, if given, other properties."""
        merged = {**self.constants, **constants}
        single = {**self.single, "SPECIFICATION": specification} if specification else self.single
        return replace(
            self,
            single=single,
            constants={k: v for k, v in merged.items() if v},
            invariants=self.invariants if invariants is None else tuple(invariants),
            properties=self.properties if properties is None else tuple(properties),
        )

    def text(self) -> str:
        """The file's text."""
        lines = [f"{k} {v}" for k, v in self.single.items()]
        for title, names in (("INVARIANTS", self.invariants), ("PROPERTIES", self.properties)):
            if names:
                lines += [title, *(f"  {n}" for n in names)]
        if self.constants:
            lines += ["CONSTANTS", *(f"  {k} {v}" for k, v in self.constants.items())]
        return "\n".join(lines) + "\n"


def read(path: Path) -> Cfg:
    """Parse a configuration file; raises as `parse`."""
    return parse(path.read_text(encoding="utf-8"), path.name)


def parse(text: str, name: str = "cfg") -> Cfg:
    """A configuration's text.

    Raises:
        CfgError: a line that is not understood, with its number.
    """
    single: dict[str, str] = {}
    constants: dict[str, str] = {}
    names: dict[str, list[str]] = {"INVARIANTS": [], "PROPERTIES": []}
    section = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = re.sub(r"\\\*.*", "", raw).strip()
        if not line:
            continue
        head, _, rest = line.partition(" ")
        if head in SECTIONS:
            section = head
            if rest:
                single[head] = rest.strip()
            continue
        match = re.fullmatch(r"(\w+)\s*(=|<-)\s*(.+)", line)
        if section == "CONSTANTS" and match:
            constants[match[1]] = f"{match[2]} {match[3]}"
        elif section in names and re.fullmatch(r"[\w\s]+", line):
            names[section] += line.split()
        else:
            raise CfgError(f"{name}:{number}: not understood: {raw!r}")
    return Cfg(single, constants, tuple(names["INVARIANTS"]), tuple(names["PROPERTIES"]))
