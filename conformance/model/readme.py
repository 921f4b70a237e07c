"""The table of models in README.md, made from the manifest and the recorded figures."""

import re
import tomllib

from conformance.model import manifest
from conformance.tla.tlc import SPEC

README = SPEC / "README.md"
BETWEEN = re.compile(r"(<!-- models[^\n]*-->\n).*?(<!-- end -->)", re.S)


def table() -> str:
    """The rows, as Markdown."""
    models = tomllib.loads((SPEC / "manifest.toml").read_text(encoding="utf-8"))["model"]
    figures = manifest.counts()
    rows = [
        "| model | bounds | leaves out | distinct states | depth | in CI |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for m in models:
        f = figures.get(m["name"], {})
        states, depth = f.get("distinct", 0), f.get("depth", 0)
        rows.append(
            f"| `{m['name']}` | {m['bounds']} | {m['leaves_out']} | {states:,} | {depth} | {'no' if m.get('deep') else 'yes'} |"
        )
    return "\n".join(rows) + "\n"


def current() -> str:
    """The table that stands in README.md."""
    found = BETWEEN.search(README.read_text(encoding="utf-8"))
    return found[0].split("-->\n", 1)[1].removesuffix("<!-- end -->") if found else ""


def write() -> None:
    """Put the table into README.md."""
    text = README.read_text(encoding="utf-8")
    README.write_text(BETWEEN.sub(lambda m: m[1] + table() + m[2], text), encoding="utf-8")
