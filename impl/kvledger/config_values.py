"""Parsers of single values: each takes a raw value and answers the typed one, or says what would do instead.

What may live here: rules about one value alone. What must fit together is checked in `config.py`.
"""

import difflib
import math
import re
from collections.abc import Callable

P2P_HANDSHAKE = "P2PHANDSHAKE"
LOCATOR_SCHEMES = ("etcd", "k8s", "redis")

_SIZE_UNITS = {"": 0, "b": 0, "k": 1, "kb": 1, "kib": 1, "m": 2, "mb": 2, "mib": 2}
_SIZE_UNITS |= {"g": 3, "gb": 3, "gib": 3, "t": 4, "tb": 4, "tib": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})", re.ASCII)
_METADATA_URL = re.compile(r"(?:(?:http|https|etcd|redis)://)?([^/\s]+)(?:/\S*)?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:\[\]%-]+", re.ASCII)


class UnusableError(Exception):
    """A value that cannot be used; carries the remedy."""


class EnvironmentText(str):
    """A value from the environment, where numbers and flags can only be text."""

    __slots__ = ()


# Takes the raw value (an EnvironmentText if it comes from there); answers the typed value or raises UnusableError.
Parser = Callable[[object], object]


def flag(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, EnvironmentText):
        known = {"true": True, "1": True, "false": False, "0": False}
        if raw.strip().lower() in known:
            return known[raw.strip().lower()]
        raise UnusableError("use true, false, 1 or 0")
    raise UnusableError("use true or false, without quotes")


def text(raw: object) -> object:
    if not isinstance(raw, str):
        raise UnusableError("use a string")
    return raw.strip()


def optional(parse: Parser) -> Parser:
    """None (in JSON null, in the environment an empty string) means: not set."""

    def parse_optional(raw: object) -> object:
        if raw is None or (isinstance(raw, str) and not raw.strip()):
            return None
        return parse(raw)

    return parse_optional


def choice(*allowed: str) -> Parser:
    def parse(raw: object) -> object:
        if isinstance(raw, str) and raw.strip() in allowed:
            return raw.strip()
        near = difflib.get_close_matches(raw, allowed, n=1) if isinstance(raw, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnusableError(f"use one of {', '.join(map(repr, allowed))}{hint}")

    return parse


def size(*, at_least: int = 1) -> Parser:
    def parse(raw: object) -> object:
        value = _size_value(raw)
        if value < at_least:
            raise UnusableError(f"use at least {at_least} bytes")
        if value >= 1 << 60:
            raise UnusableError("use a size below 1 EiB")
        return value

    return parse


def _size_value(raw: object) -> int:
    remedy = "use a whole number of bytes or a string such as '512MB', '4GiB', '80GB' or '1TB'"
    if isinstance(raw, int) and not isinstance(raw, bool):
        if raw < 0:
            raise UnusableError(f"a size cannot be negative; {remedy}")
        return raw
    if not isinstance(raw, str):
        raise UnusableError(remedy)
    match = _SIZE.fullmatch(raw.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS or len(match[1]) > 30:
        raise UnusableError(remedy)
    scale = 1024 ** _SIZE_UNITS[match[2]]
    value = float(match[1]) * scale if "." in match[1] else int(match[1]) * scale
    if value != int(value):
        raise UnusableError(f"this is not a whole number of bytes; {remedy}")
    return int(value)


def count(*, at_least: int) -> Parser:
    def parse(raw: object) -> object:
        value = raw
        if isinstance(raw, EnvironmentText) and re.fullmatch(r"[+-]?\d{1,18}", raw.strip(), re.ASCII):
            value = int(raw)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnusableError("use a whole number" + ("" if isinstance(raw, EnvironmentText) else ", without quotes"))
        if value < at_least:
            raise UnusableError(f"use {at_least} or more")
        return value

    return parse


def number(*, above: float | None = None, at_least: float = 0.0, at_most: float = math.inf) -> Parser:
    def parse(raw: object) -> object:
        value = _number_value(raw)
        if not math.isfinite(value):
            raise UnusableError("use a finite number")
        if above is not None and value <= above:
            raise UnusableError(f"use a number above {above:g}")
        if above is None and value < at_least:
            raise UnusableError(f"use {at_least:g} or more")
        if value > at_most:
            raise UnusableError(f"use {at_most:g} or less")
        return value

    return parse


def _number_value(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        try:
            return float(raw)
        except OverflowError:
            return math.inf
    if isinstance(raw, EnvironmentText):
        try:
            return float(raw)
        except ValueError:
            pass
    raise UnusableError("use a number" + ("" if isinstance(raw, EnvironmentText) else ", without quotes"))


def master_address(raw: object) -> object:
    """host:port of one master, or the locator of the masters of a high-availability cluster."""
    text = raw.strip() if isinstance(raw, str) else ""
    scheme, separator, rest = text.partition("://")
    if not separator:
        if _is_host_port(text):
            return text
    elif scheme == "etcd":
        if all(_is_host_port(one) for one in endpoints(text)):
            return text
    elif scheme in LOCATOR_SCHEMES and re.fullmatch(r"\S+", rest):
        return text
    raise UnusableError(
        "use host:port, for example '10.0.0.7:50051', or the locator of a high-availability cluster: "
        "'etcd://10.0.0.7:2379;10.0.0.8:2379', 'k8s://…' or 'redis://…', as its masters were started with"
    )


def is_locator(address: str) -> bool:
    """Whether this names a registry where the leading master is found, not a master."""
    return "://" in address


def endpoints(locator: str) -> list[str]:
    """What stands between the semicolons (or commas) of a locator."""
    return re.split("[;,]", locator.partition("://")[2])


def _is_host_port(text: str) -> bool:
    match = _HOST_PORT.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65535


def metadata_server(raw: object) -> object:
    text = raw.strip() if isinstance(raw, str) else ""
    if text == P2P_HANDSHAKE:
        return text
    match = _METADATA_URL.fullmatch(text)
    if match is None or not all(_is_host_port(one) for one in re.split("[;,]", match[1])):
        raise UnusableError(
            f"use {P2P_HANDSHAKE!r} (needs no server) or an address like 'http://10.0.0.7:8080/metadata'"
        )
    return text


def hostname(raw: object) -> object:
    if not isinstance(raw, str) or _HOST.fullmatch(raw.strip()) is None:
        raise UnusableError("use this host's name or address as its peers reach it, optionally with :port")
    return raw.strip()


def tenant(raw: object) -> object:
    """As in-tree: null and blank mean the default tenant."""
    if raw is None:
        return "default"
    if not isinstance(raw, str):
        raise UnusableError("use a string")
    return raw.strip() or "default"
