"""The parts of docs/ that are made from the code: the table of settings, and the diagrams of the two tables of lives.

Each part stands on its page between two marker comments, so that the page and the code cannot drift.
Usage: python scripts/generated.py [--write]     without --write: exit 1 if a part is out of date
Needs: kvledger (`./dev setup`).
"""

import enum
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from kvledger.config import reference
from kvledger.protocol import LOAD_LIFE, RANK_LIFE, Life, Load

L = TypeVar("L", bound=enum.Enum)
DOCS = Path(__file__).resolve().parent.parent / "docs"


def shown(default: object) -> str:
    """A setting's default as the table writes it."""
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        mebibytes = default >> 20
        return f"`{mebibytes >> 10} GiB`" if mebibytes % 1024 == 0 else f"`{mebibytes} MiB`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def settings_table() -> str:
    """Every setting with its default and its meaning, in the order of `kvledger.config`."""
    rows = [f"| `{name}` | {shown(default)} | {meaning} |" for name, default, meaning in reference()]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def life_diagram(first: L, table: Mapping[tuple[L, str], L]) -> str:
    """A table of lives as a Mermaid state diagram: its steps in the table's order, from `first` to where no step leads on."""
    steps: dict[tuple[L, L], list[str]] = {}
    for (old, action), new in table.items():
        steps.setdefault((old, new), []).append(action)
    ends = [life for life in type(first) if life not in {old for old, _ in table}]
    lines = [f"[*] --> {first.name}"]
    lines += [f"{old.name} --> {new.name}: {', '.join(actions)}" for (old, new), actions in steps.items()]
    lines += [f"{life.name} --> [*]" for life in ends]
    body = "".join(f"    {line}\n" for line in lines)
    return f"```mermaid\nstateDiagram-v2\n{body}```\n"


PARTS: list[tuple[str, str, Callable[[], str]]] = [
    ("settings.md", "settings", settings_table),
    ("protocol.md", "RANK_LIFE", lambda: life_diagram(Life.QUEUED, RANK_LIFE)),
    ("protocol.md", "LOAD_LIFE", lambda: life_diagram(Load.NONE, LOAD_LIFE)),
]
"""(page in docs/, name in its markers, what makes the part)."""


def renewed(page: str, text: str) -> str:
    """The page's text with its generated parts as they should be.

    Raises:
        ValueError: a marker is not there, so the part would be nowhere.
    """
    for name, make in [(name, make) for where, name, make in PARTS if where == page]:
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"docs/{page}: the markers {begin.strip()} and {end} must stand there once each")
        before, _, rest = text.partition(begin)
        text = before + begin + make() + end + rest.partition(end)[2]
    return text


def main() -> int:
    """Check the parts, or write them with `--write`; the exit code."""
    stale = 0
    for page in dict.fromkeys(where for where, _, _ in PARTS):
        path = DOCS / page
        old = path.read_text(encoding="utf-8")
        new = renewed(page, old)
        if old == new:
            continue
        if "--write" in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
        else:
            stale = 1
            print(f"docs/{page}: generated parts out of date: python scripts/generated.py --write", file=sys.stderr)
    return stale


if __name__ == "__main__":
    sys.exit(main())
