"""Settings: every option of kvledger, where each value came from, and one clear error for each value that cannot be.

Later sources win: default, the JSON file that MOONCAKE_CONFIG_PATH names, environment, `kv_connector_extra_config`.
What may live here: reading and checking settings; no Mooncake, no vLLM, no network. Invariants: a `Settings` made by
`load_settings` is typed, in range and consistent; nothing is ignored silently and nothing is coerced by truthiness.
Units: `_bytes` and sizes are bytes, `_s` seconds, `_ms` milliseconds. In sizes KB, MB, GB, TB mean powers of 1024, as
in vLLM's in-tree Mooncake store connector, and so do KiB, MiB, GiB, TiB.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvledger.errors import ConfigError

CONFIG_PATH_VARIABLE = "MOONCAKE_CONFIG_PATH"
ENVIRONMENT_PREFIX = "KVLEDGER_"
EXTRA_CONFIG = "kv_connector_extra_config"
P2P_HANDSHAKE = "P2PHANDSHAKE"

# Variables of kvledger's own tests, demo and benchmarks, not settings of the product.
_RESERVED_VARIABLES = ("KVLEDGER_TEST_", "KVLEDGER_DEMO_", "KVLEDGER_BENCH_", "KVLEDGER_DEV_")

# Mooncake's own variables. KVLEDGER_<FIELD> wins over these; of two for one field the later here wins.
MOONCAKE_VARIABLES: Mapping[str, str] = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_PREFERRED_SEGMENT": "preferred_segment",
}

# Options of the in-tree connector that kvledger does not have; the in-tree default passes.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "lookup_rpc_port": (0, None),
    "enable_group_semantics": ("False", False, None),
    "custom_mem_pool": (None,),
    "store_tp_size": (None,),
    "enable_store_tp_lcm": (False, None),
    "prefill_tp_sizes": (None,),
    "enable_cross_layers_blocks": ("False", False, None),
}

_SIZE_UNITS = {"": 0, "b": 0, "k": 1, "kb": 1, "kib": 1, "m": 2, "mb": 2, "mib": 2}
_SIZE_UNITS |= {"g": 3, "gb": 3, "gib": 3, "t": 4, "tb": 4, "tib": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})", re.ASCII)
_METADATA_URL = re.compile(r"(?:(?:http|https|etcd|redis)://)?([^/\s]+)(?:/\S*)?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:\[\]%-]+", re.ASCII)


class _UnusableError(Exception):
    """A value that cannot be used; carries the remedy. Never leaves this module."""


class _EnvironmentText(str):
    """A value from the environment, where numbers and flags can only be text."""

    __slots__ = ()


# Takes the raw value (an _EnvironmentText if it comes from there); answers the typed value or raises _UnusableError.
_Parser = Callable[[object], object]


# -- parsers ---------------------------------------------------------------


def _flag(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, _EnvironmentText):
        known = {"true": True, "1": True, "false": False, "0": False}
        if raw.strip().lower() in known:
            return known[raw.strip().lower()]
        raise _UnusableError("use true, false, 1 or 0")
    raise _UnusableError("use true or false, without quotes")


def _text(raw: object) -> object:
    if not isinstance(raw, str):
        raise _UnusableError("use a string")
    return raw.strip()


def _optional(parse: _Parser) -> _Parser:
    """None (in JSON null, in the environment an empty string) means: not set."""

    def parse_optional(raw: object) -> object:
        if raw is None or (isinstance(raw, str) and not raw.strip()):
            return None
        return parse(raw)

    return parse_optional


def _choice(*allowed: str) -> _Parser:
    def parse(raw: object) -> object:
        if isinstance(raw, str) and raw.strip() in allowed:
            return raw.strip()
        near = difflib.get_close_matches(raw, allowed, n=1) if isinstance(raw, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise _UnusableError(f"use one of {', '.join(map(repr, allowed))}{hint}")

    return parse


def _size(*, at_least: int = 1) -> _Parser:
    def parse(raw: object) -> object:
        value = _size_value(raw)
        if value < at_least:
            raise _UnusableError(f"use at least {at_least} bytes")
        if value >= 1 << 60:
            raise _UnusableError("use a size below 1 EiB")
        return value

    return parse


def _size_value(raw: object) -> int:
    remedy = "use a whole number of bytes or a string such as '512MB', '4GiB', '80GB' or '1TB'"
    if isinstance(raw, int) and not isinstance(raw, bool):
        if raw < 0:
            raise _UnusableError(f"a size cannot be negative; {remedy}")
        return raw
    if not isinstance(raw, str):
        raise _UnusableError(remedy)
    match = _SIZE.fullmatch(raw.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS or len(match[1]) > 30:
        raise _UnusableError(remedy)
    scale = 1024 ** _SIZE_UNITS[match[2]]
    value = float(match[1]) * scale if "." in match[1] else int(match[1]) * scale
    if value != int(value):
        raise _UnusableError(f"this is not a whole number of bytes; {remedy}")
    return int(value)


def _count(*, at_least: int) -> _Parser:
    def parse(raw: object) -> object:
        value = raw
        if isinstance(raw, _EnvironmentText) and re.fullmatch(r"[+-]?\d{1,18}", raw.strip(), re.ASCII):
            value = int(raw)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _UnusableError(
                "use a whole number" + ("" if isinstance(raw, _EnvironmentText) else ", without quotes")
            )
        if value < at_least:
            raise _UnusableError(f"use {at_least} or more")
        return value

    return parse


def _number(*, above: float | None = None, at_least: float = 0.0, at_most: float = math.inf) -> _Parser:
    def parse(raw: object) -> object:
        value = _number_value(raw)
        if not math.isfinite(value):
            raise _UnusableError("use a finite number")
        if above is not None and value <= above:
            raise _UnusableError(f"use a number above {above:g}")
        if above is None and value < at_least:
            raise _UnusableError(f"use {at_least:g} or more")
        if value > at_most:
            raise _UnusableError(f"use {at_most:g} or less")
        return value

    return parse


def _number_value(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        try:
            return float(raw)
        except OverflowError:
            return math.inf
    if isinstance(raw, _EnvironmentText):
        try:
            return float(raw)
        except ValueError:
            pass
    raise _UnusableError("use a number" + ("" if isinstance(raw, _EnvironmentText) else ", without quotes"))


def _address(raw: object) -> object:
    text = raw.strip() if isinstance(raw, str) else ""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise _UnusableError("use host:port, for example '10.0.0.7:50051'")
    return text


def _metadata_server(raw: object) -> object:
    text = raw.strip() if isinstance(raw, str) else ""
    if text == P2P_HANDSHAKE:
        return text
    match = _METADATA_URL.fullmatch(text)
    if match is None or _HOST_PORT.fullmatch(match[1]) is None:
        raise _UnusableError(
            f"use {P2P_HANDSHAKE!r} (needs no server) or an address like 'http://10.0.0.7:8080/metadata'"
        )
    return text


def _hostname(raw: object) -> object:
    if not isinstance(raw, str) or _HOST.fullmatch(raw.strip()) is None:
        raise _UnusableError("use this host's name or address as its peers reach it, optionally with :port")
    return raw.strip()


def _tenant(raw: object) -> object:
    """As in-tree: null and blank mean the default tenant."""
    if raw is None:
        return "default"
    if not isinstance(raw, str):
        raise _UnusableError("use a string")
    return raw.strip() or "default"


# -- the settings ----------------------------------------------------------


def _setting(default: object, parse: _Parser, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "doc": doc})


_MIB = 1024**2
_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, typed. Build it with `load_settings`; building it directly checks nothing."""

    # The store: names of the in-tree connector's JSON file.
    master_server_address: str | None = _setting(
        None, _optional(_address), "the Mooncake master, host:port; not set: an embedded store on this host"
    )
    metadata_server: str = _setting(P2P_HANDSHAKE, _metadata_server, "P2PHANDSHAKE, or a metadata server's address")
    protocol: Literal["tcp", "rdma"] = _setting(
        "tcp", _choice("tcp", "rdma"), "transport between hosts (the in-tree connector's default is rdma)"
    )
    device_name: str = _setting("", _text, "RDMA devices, comma-separated; empty: found automatically")
    mode: Literal["embedded", "standalone-store"] = _setting(
        "embedded",
        _choice("embedded", "standalone-store"),
        "embedded: each rank gives global_segment_size to the store; standalone-store: others own the memory",
    )
    global_segment_size: int = _setting(
        4 * _GIB, _size(at_least=0), "bytes of host memory that each rank (or the embedded store) gives to the store"
    )
    local_buffer_size: int = _setting(
        512 * _MIB,
        _size(),
        "bytes of Mooncake's own client buffer; kvledger copies nothing through it (in-tree default: 4 GiB)",
    )
    enable_offload: bool = _setting(
        False,
        _flag,
        "ask Mooncake for its SSD tier on segments this process gives; needs the master's --enable_offload",
    )
    tenant_id: str = _setting(
        "default", _tenant, "Mooncake tenant; has an effect only where the master runs with --enable_multi_tenants"
    )
    local_hostname: str | None = _setting(
        None, _optional(_hostname), "this host as its peers reach it; not set: 127.0.0.1 if embedded, else found out"
    )
    # Behaviour: names of the in-tree connector's extra config.
    load_async: bool = _setting(True, _flag, "load while the request waits and others run; false: load before the step")
    lookup_async: bool = _setting(True, _flag, "never wait for a lookup longer than lookup_wait_s (in-tree: false)")
    enable_lookup: bool = _setting(True, _flag, "look for stored prefixes; false: this engine only saves")
    save_decode_cache: bool = _setting(False, _flag, "also save blocks that decoding fills, not only the prompt's")
    cache_prefix: str = _setting("", _text, "put before every key, so that deployments share a master without mixing")
    preferred_segment: str | None = _setting(
        None, _optional(_text), "name of the segment (host:port) that puts should prefer"
    )
    # kvledger's own.
    weights_version: str | None = _setting(
        None, _optional(_text), "part of every key's fingerprint; change it when weights change under the same name"
    )
    transfer_mode: Literal["auto", "staged", "direct"] = _setting(
        "auto",
        _choice("auto", "staged", "direct"),
        "gather into a staging slot, or not; auto: staged on tcp, else direct",
    )
    staging_bytes: int = _setting(256 * _MIB, _size(), "registered staging memory of each rank, all slots together")
    max_batch_bytes: int = _setting(64 * _MIB, _size(), "most bytes in one call to the store")
    max_segments_in_flight: int = _setting(
        1536, _count(at_least=1), "most address ranges in one call to the store (Mooncake's TCP queue holds about 2048)"
    )
    lookup_timeout_s: float = _setting(2.0, _number(above=0), "a lookup that takes longer is a miss")
    lookup_wait_s: float = _setting(0.01, _number(), "longest time a lookup holds up the scheduler thread")
    lookup_chunk_blocks: int = _setting(256, _count(at_least=1), "blocks per existence query; stops at the first miss")
    breaker_failures: int = _setting(3, _count(at_least=1), "failures in a row after which the store is left alone")
    breaker_open_s: float = _setting(5.0, _number(above=0), "how long it is left alone before one probe; doubles")
    max_pinned_fraction: float = _setting(
        0.5, _number(above=0, at_most=1), "most blocks that saves may hold, as a fraction of the KV pool"
    )
    max_pinned_blocks: int | None = _setting(
        None,
        _optional(_count(at_least=1)),
        "a number of blocks, instead of the fraction and without its room for one full request",
    )
    stall_timeout_s: float = _setting(
        10.0, _number(above=0), "after this long without a report vLLM no longer waits for saves to free blocks"
    )
    quarantine_s: float = _setting(
        120.0, _number(above=0), "how long blocks stay held after a transfer that may still be moving bytes"
    )
    transfer_timeout_s: float = _setting(
        90.0, _number(above=0), "a job whose store call has not returned is given up (Mooncake itself gives up at 60 s)"
    )
    load_timeout_s: float = _setting(60.0, _number(above=0), "a load that waits longer is failed and recomputed")
    max_store_attempts: int = _setting(3, _count(at_least=1), "tries to save one block")
    retry_backoff_s: float = _setting(1.0, _number(above=0), "first wait after the store refused for want of space")
    min_load_tokens: int = _setting(0, _count(at_least=0), "hits shorter than this are recomputed instead of loaded")
    max_loads_in_flight: int | None = _setting(
        None, _optional(_count(at_least=1)), "most requests that load at the same time; not set: no limit"
    )
    shutdown_timeout_s: float = _setting(10.0, _number(above=0), "longest wait for transfers at shutdown")
    embedded_linger_s: float = _setting(
        30.0, _number(), "how long the embedded store outlives the last engine that uses it"
    )
    embedded_dir: str | None = _setting(
        None, _optional(_text), "folder of the embedded store's socket and log; another folder is another store"
    )
    trace_dir: str | None = _setting(
        None, _optional(_text), "folder for a recording of the protocol's events (JSON lines); not set: none"
    )
    fault_delay_ms: float = _setting(0.0, _number(), "testing aid: delays every store operation of the ranks")

    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def embedded_store(self) -> bool:
        """Whether no master is configured, so that an embedded store on this host is used."""
        return self.master_server_address is None

    @property
    def resolved_transfer_mode(self) -> Literal["staged", "direct"]:
        """`transfer_mode` with `auto` decided (`load_settings` has decided it in the field, too)."""
        if self.transfer_mode == "auto":
            return "staged" if self.protocol == "tcp" else "direct"
        return self.transfer_mode

    @property
    def rank_segment_bytes(self) -> int:
        """What one rank gives to the store: nothing when the embedded store or a standalone owner has the memory."""
        if self.embedded_store or self.mode == "standalone-store":
            return 0
        return self.global_segment_size

    def attached_to(self, master_address: str) -> "Settings":
        """The settings of a process that uses the embedded store whose master is at `master_address`."""
        return dataclasses.replace(
            self,
            master_server_address=master_address,
            mode="standalone-store",
            global_segment_size=0,
            local_hostname=self.local_hostname or "127.0.0.1",
            sources={**self.sources, "master_server_address": "embedded store"},
        )

    def describe(self) -> list[str]:
        """One line per setting: name, value, source."""
        return [
            f"{spec.name} = {getattr(self, spec.name)!r} ({self.sources.get(spec.name, 'default')})"
            for spec in _specs()
        ]


def _specs() -> Iterator["dataclasses.Field[Any]"]:
    return (spec for spec in dataclasses.fields(Settings) if "parse" in spec.metadata)


def reference() -> list[tuple[str, object, str]]:
    """Name, default and meaning of every setting, for documentation."""
    return [(spec.name, spec.default, str(spec.metadata["doc"])) for spec in _specs()]


# -- reading the sources ---------------------------------------------------


def load_settings(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Read and check all sources. Raises ConfigError for the first thing that cannot be used."""
    merged: dict[str, tuple[object, str]] = {}
    for values, source in _sources(extra_config, environ):
        for name, raw in values.items():
            if _is_field(name, raw, source):
                merged[name] = (_parsed(name, raw, source), source)
    settings = Settings(
        **{name: value for name, (value, _) in merged.items()},  # type: ignore[arg-type]
        sources={name: source for name, (_, source) in merged.items()},
    )
    return _checked(settings)


def _sources(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[Mapping[str, object], str]]:
    """Every source as (values by field, name for messages), weakest first."""
    path = environ.get(CONFIG_PATH_VARIABLE)
    if path is not None:
        yield _read_file(path), f"file {path}"
    for variable, field in MOONCAKE_VARIABLES.items():
        if variable in environ:
            yield {field: _EnvironmentText(environ[variable])}, f"environment variable {variable}"
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(_RESERVED_VARIABLES):
            field = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            yield {field: _EnvironmentText(environ[variable])}, f"environment variable {variable}"
    yield extra_config, EXTRA_CONFIG


def _read_file(path: str) -> Mapping[str, object]:
    def unusable(remedy: str) -> ConfigError:
        return ConfigError(CONFIG_PATH_VARIABLE, path, remedy, "environment")

    if not path.strip():
        raise unusable("name a JSON file, or unset the variable")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise unusable(f"the file cannot be read ({error.strerror or error}); correct the path") from error
    except UnicodeDecodeError as error:
        raise unusable("the file is not UTF-8 text; write it as JSON") from error
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise unusable(f"the file is not valid JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise unusable('the file must hold one JSON object, like {"master_server_address": "10.0.0.7:50051"}')
    return content


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return content


def _is_field(name: str, raw: object, source: str) -> bool:
    """Whether `name` is a setting; false for an in-tree option at its default. Raises for anything else."""
    names = [spec.name for spec in _specs()]
    if name in names:
        return True
    if name in _UNSUPPORTED:
        if any(type(raw) is type(default) and raw == default for default in _UNSUPPORTED[name]):
            return False
        raise ConfigError(
            name, raw, "kvledger does not support this option of the in-tree connector; remove it", source
        )
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "no setting has a name like it; remove it"
    raise ConfigError(str(name), raw, f"unknown setting; {hint}", source)


def _parsed(name: str, raw: object, source: str) -> object:
    parse: _Parser = next(spec.metadata["parse"] for spec in _specs() if spec.name == name)
    try:
        return parse(raw)
    except _UnusableError as error:
        raise ConfigError(name, raw, str(error), source) from None


# -- what must fit together ------------------------------------------------


def _checked(settings: Settings) -> Settings:
    settings = _check_store(settings)
    _check_transfers(settings)
    if settings.transfer_mode == "auto":
        sources = {**settings.sources, "transfer_mode": f"auto, protocol {settings.protocol}"}
        settings = dataclasses.replace(settings, transfer_mode=settings.resolved_transfer_mode, sources=sources)
    return settings


def _refuse(settings: Settings, field: str, remedy: str) -> ConfigError:
    return ConfigError(field, getattr(settings, field), remedy, settings.sources.get(field, "default"))


def _check_store(settings: Settings) -> Settings:
    if settings.embedded_store:
        _check_embedded(settings)
    if settings.mode == "standalone-store":
        # The in-tree connector accepts a size here and ignores it; so do we, that a user can switch by one word.
        sources = {**settings.sources, "global_segment_size": "0 in mode standalone-store"}
        return dataclasses.replace(settings, global_segment_size=0, sources=sources)
    if not settings.global_segment_size:
        raise _refuse(
            settings,
            "global_segment_size",
            "use a size above 0, or mode 'standalone-store' where others own the memory",
        )
    return settings


def _check_embedded(settings: Settings) -> None:
    """Without a master address the store is a daemon on this host, over loopback TCP."""
    only_external = {
        "mode": settings.mode == "standalone-store",
        "protocol": settings.protocol != "tcp",
        "metadata_server": settings.metadata_server != P2P_HANDSHAKE,
        "enable_offload": settings.enable_offload,
    }
    for field, wrong in only_external.items():
        if wrong:
            raise _refuse(
                settings, field, "this needs a Mooncake cluster; set master_server_address to its master, or remove it"
            )


def _check_transfers(settings: Settings) -> None:
    if settings.staging_bytes < settings.max_batch_bytes:
        raise _refuse(
            settings, "staging_bytes", f"use at least max_batch_bytes ({settings.max_batch_bytes}), or lower that"
        )
    if not settings.load_async and settings.resolved_transfer_mode == "direct":
        raise _refuse(
            settings,
            "load_async",
            "a synchronous load cannot be held back when a direct transfer outlives its call; "
            "set transfer_mode to 'staged', or load_async to true",
        )
    if settings.lookup_wait_s > settings.lookup_timeout_s:
        raise _refuse(
            settings, "lookup_wait_s", f"use at most lookup_timeout_s ({settings.lookup_timeout_s:g}), or raise that"
        )
