"""The README's table of settings, made from kvledger.config, so that the two cannot drift.

Usage: python scripts/settings_table.py [--write]     without --write: exit 1 if the README's table is out of date
Needs: kvledger (`./dev setup`).
"""

import sys
from pathlib import Path

from kvledger.config import reference

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->"


def shown(default: object) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        mebibytes = default >> 20
        return f"`{mebibytes >> 10} GiB`" if mebibytes % 1024 == 0 else f"`{mebibytes} MiB`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def table() -> str:
    rows = [f"| `{name}` | {shown(default)} | {meaning} |" for name, default, meaning in reference()]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> int:
    old = README.read_text(encoding="utf-8")
    new = with_table(old)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
        return 0
    if old != new:
        print("README.md: settings out of date: python scripts/settings_table.py --write", file=sys.stderr)
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
