"""A TLA+ module as text: what it defines and declares, without comments and layout."""

import functools
import re
from collections.abc import Iterator

from conformance.tla import tlc

_HEAD = re.compile(r"^(?:([A-Za-z_]\w*)(?:\([^)\n]*\))? *==|(CONSTANT|VARIABLE)S?\b|-{4}|={4})", re.M)


def without_comments(text: str) -> str:
    """The text with blanks for its comments: every position stays what it is."""
    kept, depth = [], 0
    for piece in re.split(r"(\(\*|\*\)|\\\*(?:(?!\*\))[^\n])*)", text):
        depth += piece == "(*"
        kept.append(re.sub(r"[^\n]", " ", piece) if depth or piece.startswith("\\*") else piece)
        depth -= piece == "*)"
    return "".join(kept)


def definitions(text: str) -> Iterator[tuple[str, int, str]]:
    """Name, position and text, comments blanked, of each definition at the left margin; declarations go by their keyword."""
    plain = without_comments(text)
    heads = [*_HEAD.finditer(plain)]
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(plain)], strict=True):
        if head[1] or head[2]:
            yield head[1] or head[2], head.start(), plain[head.start() : end]


@functools.cache
def known(module: str) -> dict[str, str]:
    """Definitions and declarations of a module and of those it builds on, by name, without any white space."""
    try:
        text = tlc.find(f"{module}.tla").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}  # a module of TLA+ itself
    plain, found = without_comments(text), dict[str, str]()
    extended = " ".join(re.findall(r"\bEXTENDS\s+([\w, \n]+?)\n(?=\S|\n)", plain))
    for other in re.findall(r"\w+", extended) + re.findall(r"\bINSTANCE (\w+)", plain):
        found |= known(other)
    for name, _, part in definitions(text):
        found[name if "==" in part.partition("\n")[0] else f"{part.split()[0]} of {module}"] = "".join(part.split())
    return found
