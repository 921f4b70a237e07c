"""TLA+ values as TLC prints them, read into Python: sets, tuples, records, functions, strings, numbers, booleans."""

import functools
import re
from typing import Any

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|<<|>>|\|->|:>|@@|[{}\[\](),]|-?\d+|\w+)')


class ParseError(ValueError):
    """Not a value that TLC prints."""


@functools.lru_cache(maxsize=1 << 16)
def parse(text: str) -> Any:
    """The value. Sets are frozensets, tuples tuples; records and functions are dictionaries.

    Raises:
        ParseError: something else is there.
    """
    tokens = _TOKEN.findall(text)
    value, rest = _value(tokens, 0)
    if rest != len(tokens):
        raise ParseError(f"after the value: {tokens[rest:][:5]}")
    return value


def _value(tokens: list[str], at: int) -> tuple[Any, int]:
    token = tokens[at]
    if token == "{":
        items, at = _items(tokens, at + 1, "}")
        return frozenset(items), at
    if token == "<<":
        items, at = _items(tokens, at + 1, ">>")
        return tuple(items), at
    if token == "[":
        return _record(tokens, at + 1)
    if token == "(":
        return _function(tokens, at + 1)
    if token.startswith('"'):
        return token[1:-1], at + 1
    if token in ("TRUE", "FALSE"):
        return token == "TRUE", at + 1
    if token.lstrip("-").isdigit():
        return int(token), at + 1
    raise ParseError(f"unexpected {token!r}")


def _items(tokens: list[str], at: int, end: str) -> tuple[list[Any], int]:
    out = []
    while tokens[at] != end:
        item, at = _value(tokens, at)
        out.append(item)
        at += tokens[at] == ","
    return out, at + 1


def _record(tokens: list[str], at: int) -> tuple[dict[str, Any], int]:
    out: dict[str, Any] = {}
    while tokens[at] != "]":
        name = tokens[at]
        out[name], at = _value(tokens, at + 2)
        at += tokens[at] == ","
    return out, at + 1


def _function(tokens: list[str], at: int) -> tuple[dict[Any, Any], int]:
    out: dict[Any, Any] = {}
    while tokens[at] != ")":
        key, at = _value(tokens, at)
        out[key], at = _value(tokens, at + 1)
        at += tokens[at] == "@@"
    return out, at + 1
