"""Scripts that are always run: public bug reports and known weaknesses, told as actions in `scenarios.txt`.

Each names where it comes from and the property that a connector with that bug breaks. They are the fast part of a run
on a strange connector; the state machines go on from there.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvledger_conformance.engine.compat import Shape
from kvledger_conformance.suite.driver import Driver, Script
from kvledger_conformance.suite.properties import PROPERTIES

TOLD = Path(__file__).with_name("scenarios.txt")
VERBS = {name.removeprefix("do_"): partial(do, None) for name, do in vars(Driver).items() if name.startswith("do_")}
SMALL = {"add": {"tail": "1", "tokens": "2"}}
"""What an action has unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`breaks`: the property that a connector with this bug breaks. `past`: what may break before that and would hide it;
    other scenarios look for it."""

    name: str
    source: str
    breaks: str
    script: Script
    shape: Shape = field(default_factory=Shape)
    past: frozenset[str] = frozenset()


def parse(text: str, file: str) -> tuple[Scenario, ...]:
    """The scenarios of a text in the form that the head of `scenarios.txt` gives; `file` names it in errors.

    Raises:
        ValueError: a key, verb, argument, property or snippet that does not exist, or a scenario that lacks something;
            with file, line and what there is.
    """
    reader = _Reader()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        try:
            reader.take(line.strip())
        except ValueError as error:
            raise ValueError(f"{file}:{number}: {error}") from None
    return tuple(reader.scenarios)


class _Reader:
    """Takes the lines; an empty one ends a scenario or a snippet."""

    def __init__(self) -> None:
        self.scenarios: list[Scenario] = []
        self._snippets: dict[str, Script] = {}
        self._facts: dict[str, Any] = {}
        self._script: Script = []

    def take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if not line:
            self._end(self._facts, self._script)
            self._facts, self._script = {}, []
        elif word.endswith(":"):
            self._fact(word[:-1], rest.strip())
        elif word == "use":
            self._script += _known("snippet", rest, self._snippets)
        elif not word.startswith("#"):
            arguments = _arguments(_known("verb", word, VERBS), rest.split(), SMALL.get(word, {}))
            self._script.append({"do": word, **arguments})

    def _fact(self, key: str, text: str) -> None:
        read = _known("key", key, KEYS)
        if key in self._facts:
            raise ValueError(f"{key!r} for the second time; an empty line ends a scenario")
        self._facts[key] = read(text)

    def _end(self, facts: dict[str, Any], script: Script) -> None:
        if not facts and not script:
            return
        if not script or facts.keys() - {"past", "shape"} not in ({"snippet"}, {"scenario", "source", "breaks"}):
            raise ValueError("what ends here needs actions, and either snippet or scenario, source and breaks")
        if "snippet" in facts:
            self._snippets[facts["snippet"]] = script
        else:
            self.scenarios.append(Scenario(facts.pop("scenario"), script=script, **facts))


def _known(what: str, word: str, those: Mapping[str, Any]) -> Any:
    if word not in those:
        raise ValueError(f"no {what} is called {word!r}; there are {', '.join(those)}")
    return those[word]


def _property(name: str) -> str:
    _known("property", name, PROPERTIES)
    return name


def _arguments(called: Callable[..., Any], words: list[str], otherwise: Mapping[str, str]) -> dict[str, Any]:
    """Words as the arguments of a call, in its order: by place, or `name=value`."""
    placed = [word for word in words if "=" not in word]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    signature = inspect.signature(called)
    try:
        if len(placed) + len(named) < len(words):
            raise TypeError("an argument is given twice")
        found = signature.bind(*placed, **{**otherwise, **named}).arguments
        return {name: _value(word, signature.parameters[name].annotation) for name, word in found.items()}
    except TypeError as error:
        raise ValueError(f"{error}; arguments are {signature}") from None


def _value(word: str, kind: Any) -> Any:
    try:
        literal = ast.literal_eval(word)
    except (SyntaxError, ValueError):
        literal = word
    for value in (literal, word):
        if isinstance(value, kind):
            return value
    raise TypeError(f"{word!r} is no {kind}")


KEYS: dict[str, Callable[[str], Any]] = {
    "scenario": str,
    "snippet": str,
    "source": str,
    "breaks": _property,
    "past": lambda text: frozenset(map(_property, text.split(", "))),
    "shape": lambda text: Shape(**_arguments(Shape, text.split(), {})),
}
SCENARIOS = parse(TOLD.read_text(encoding="utf-8"), TOLD.name)
