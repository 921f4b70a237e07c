"""Parser for the values that TLC prints: numbers, strings, sets, sequences, records, functions, model values.

Sets become `frozenset`, sequences `tuple`, records and functions `Fun` (a hashable dict), `1..3` a frozenset.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

TOKEN = re.compile(r'\s*(<<|>>|\|->|:>|@@|\.\.|[\[\]{}(),]|"(?:[^"\\]|\\.)*"|-?\d+|[A-Za-z_]\w*)')


class NotAValue(ValueError):
    """Text that is not a TLC value."""


class Fun(dict[Any, Any]):
    """A function or record. Hashable, so that it may be a member of a set."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._split(text))
        self.at = 0

    @staticmethod
    def _split(text: str) -> Iterator[str]:
        pos, text = 0, text.rstrip()
        while pos < len(text):
            match = TOKEN.match(text, pos)
            if match is None:
                raise NotAValue(f"cannot read {text[pos : pos + 20]!r} at {pos} in {text[:60]!r}")
            pos = match.end()
            yield match[1]

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, want: str = "") -> str:
        token = self.peek()
        if not token or (want and token != want):
            raise NotAValue(f"expected {want or 'a value'}, found {token or 'the end'} in {self.text[:60]!r}")
        self.at += 1
        return token

    def items(self, close: str, arrow: str = "", separator: str = ",") -> Iterator[Any]:
        """Values up to a closing token, or, with an arrow, pairs of them."""
        while self.peek() != close:
            item = self.value()
            if arrow:
                self.take(arrow)
                item = item, self.value()
            yield item
            if self.peek() != close:
                self.take(separator)
        self.take(close)

    def value(self) -> Any:
        token = self.take()
        if token == "<<":
            return tuple(self.items(">>"))
        if token == "{":
            return frozenset(self.items("}"))
        if token == "[":
            return Fun(self.items("]", "|->"))
        if token == "(":
            return Fun(self.items(")", ":>", "@@"))
        if token.startswith('"'):
            return re.sub(r"\\(.)", r"\1", token[1:-1])
        if re.fullmatch(r"-?\d+", token):
            return self._number(int(token))
        if re.fullmatch(r"[A-Za-z_]\w*", token):
            return {"TRUE": True, "FALSE": False}.get(token, token)
        raise NotAValue(f"unexpected {token!r} in {self.text[:60]!r}")

    def _number(self, low: int) -> Any:
        if self.peek() != "..":
            return low
        self.take("..")
        return frozenset(range(low, int(self.take()) + 1))


@functools.lru_cache(maxsize=1 << 16)
def parse(text: str) -> Any:
    """The Python value of one TLC value; not to be changed, for the same text gives the same object.

    Raises:
        NotAValue: the text is not one complete value.
    """
    parser = _Parser(text)
    value = parser.value()
    if parser.peek():
        raise NotAValue(f"text left after the value: {parser.peek()!r} in {text[:60]!r}")
    return value


def variables(state: str) -> dict[str, str]:
    """The text of each variable of a printed state, in one line."""
    parts = re.split(r"^/\\ (\w+) = ", state, flags=re.M)
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def state(text: str) -> dict[str, Any]:
    """The variables of a printed state."""
    return {name: parse(shown) for name, shown in variables(text).items()}


def entries(function: Any) -> dict[Any, Any]:
    """A function as a dict, whether TLC printed it as a sequence (domain 1..n), a record or a function."""
    if isinstance(function, tuple):
        return dict(enumerate(function, start=1))
    return dict(function)
