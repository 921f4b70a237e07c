"""Settings: every option of kvledger, where each value came from, and one clear error for each value that cannot be.

Later sources win: default, the JSON file that MOONCAKE_CONFIG_PATH names, environment, `kv_connector_extra_config`.
What may live here: reading and checking settings; no Mooncake, no vLLM, no network. Invariants: a `Settings` made by
`load_settings` is typed, in range and consistent; nothing is ignored without a line in `Settings.describe`, and nothing
is coerced by truthiness.
Units: `_bytes` and sizes are bytes, `_s` seconds, `_ms` milliseconds. In sizes KB, MB, GB, TB mean powers of 1024, as
in vLLM's in-tree Mooncake store connector, and so do KiB, MiB, GiB, TiB.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvledger import config_values
from kvledger.errors import ConfigError

CONFIG_PATH_VARIABLE = "MOONCAKE_CONFIG_PATH"
ENVIRONMENT_PREFIX = "KVLEDGER_"
EXTRA_CONFIG = "kv_connector_extra_config"

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

# The transports that some build of Mooncake's store has; the installed one is asked at start. Not among them: rpc_only,
# which moves no bytes.
PROTOCOLS = (
    "tcp",
    "rdma",
    "efa",
    "nvlink",
    "nvlink_intra",
    "barex",
    "ascend",
    "ub",
    "ubshmem",
    "hip",
    "musa",
    "maca",
    "cxl",
    "nvmeof",
    "sunrise_link",
)

# What Kubernetes puts into every pod for a Service whose name begins with "kvledger".
_SERVICE_VARIABLE = re.compile(
    r"KVLEDGER_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)",
    re.ASCII,
)
_SERVICE_URL_VARIABLE = re.compile(r"KVLEDGER_(?:\w+_)?PORT", re.ASCII)
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://\S+", re.ASCII)

# Options of the in-tree connector, and of Mooncake's own configuration file, that change nothing about what is shared:
# accepted, with a line that says why they have no effect.
_WITHOUT_MEANING: Mapping[str, str] = {
    "lookup_rpc_port": "the scheduler asks the store itself, over no port",
    "custom_mem_pool": "KV blocks stay in vLLM's own memory pool",
    "enable_group_semantics": "objects are evicted one by one",
    "enable_cross_layers_blocks": "blocks lie as vLLM's kv_cache_layout says",
    "prefill_tp_sizes": "it only completes enable_store_tp_lcm",
    "enable_ssd_offload": "this setting is called enable_offload here, as in the in-tree connector",
    "ssd_offload_path": "Mooncake reads MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "enable_client_http_server": "kvledger's store clients serve no HTTP",
    "client_http_port": "kvledger's store clients serve no HTTP",
}

# Options of the in-tree connector that would change what engines share: refused where the in-tree connector obeys them.
_REFUSED: Mapping[str, Callable[[object], bool]] = {
    "store_tp_size": lambda raw: raw is not None,
    "enable_store_tp_lcm": lambda raw: raw is True,
}


# -- the settings ----------------------------------------------------------


def _setting(default: object, parse: config_values.Parser, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "doc": doc})


_MIB = 1024**2
_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, typed. Build it with `load_settings`; building it directly checks nothing."""

    # The store: names of the in-tree connector's JSON file.
    master_server_address: str | None = _setting(
        None,
        config_values.optional(config_values.master_address),
        "the Mooncake master, host:port, or a high-availability cluster's etcd://…, k8s://… or redis://…; "
        "not set: an embedded store on this host",
    )
    metadata_server: str = _setting(
        config_values.P2P_HANDSHAKE, config_values.metadata_server, "P2PHANDSHAKE, or a metadata server's address"
    )
    protocol: str = _setting(
        "tcp",
        config_values.choice(*PROTOCOLS),
        "transport between hosts: tcp, rdma, efa or another that the installed Mooncake was built with (the in-tree "
        "connector's default is rdma)",
    )
    device_name: str = _setting("", config_values.text, "RDMA devices, comma-separated; empty: found automatically")
    mode: Literal["embedded", "standalone-store"] = _setting(
        "embedded",
        config_values.choice("embedded", "standalone-store"),
        "embedded: each rank gives global_segment_size to the store; standalone-store: others own the memory",
    )
    global_segment_size: int = _setting(
        4 * _GIB,
        config_values.size(at_least=0),
        "bytes of host memory that each rank (or the embedded store) gives to the store",
    )
    local_buffer_size: int = _setting(
        512 * _MIB,
        config_values.size(),
        "bytes of Mooncake's own client buffer; kvledger copies nothing through it (in-tree default: 4 GiB)",
    )
    enable_offload: bool = _setting(
        False,
        config_values.flag,
        "ask Mooncake for its SSD tier on segments this process gives; needs the master's --enable_offload",
    )
    tenant_id: str = _setting(
        "default",
        config_values.tenant,
        "Mooncake tenant; has an effect only where the master runs with --enable_multi_tenants",
    )
    local_hostname: str | None = _setting(
        None,
        config_values.optional(config_values.hostname),
        "this host as its peers reach it; not set: 127.0.0.1 if embedded, else found out",
    )
    # Behaviour: names of the in-tree connector's extra config.
    load_async: bool = _setting(
        True,
        config_values.flag,
        "load while the request waits and others run; false: load before the step (staged, no async scheduling)",
    )
    lookup_async: bool = _setting(
        True, config_values.flag, "never wait for a lookup longer than lookup_wait_s (in-tree: false)"
    )
    enable_lookup: bool = _setting(True, config_values.flag, "look for stored prefixes; false: this engine only saves")
    save_decode_cache: bool = _setting(
        False, config_values.flag, "also save blocks that decoding fills, not only the prompt's"
    )
    cache_prefix: str = _setting(
        "", config_values.text, "put before every key, so that deployments share a master without mixing"
    )
    preferred_segment: str | None = _setting(
        None, config_values.optional(config_values.text), "name of the segment (host:port) that puts should prefer"
    )
    # kvledger's own.
    weights_version: str | None = _setting(
        None,
        config_values.optional(config_values.text),
        "added to the identity of the weights in every key; needed where neither files nor a commit identify them",
    )
    weights_digest: Literal["sampled", "full"] = _setting(
        "sampled",
        config_values.choice("sampled", "full"),
        "sampled: samples of each tensor above 256 MiB in all; full: every byte, once per state of the files",
    )
    transfer_mode: Literal["auto", "staged", "direct"] = _setting(
        "auto",
        config_values.choice("auto", "staged", "direct"),
        "gather into a staging slot, or not; auto: staged on tcp, else direct",
    )
    staging_bytes: int = _setting(
        256 * _MIB, config_values.size(), "registered staging memory of each rank: half for stores, half for loads"
    )
    max_batch_bytes: int = _setting(64 * _MIB, config_values.size(), "most bytes in one call to the store")
    max_segments_in_flight: int = _setting(
        1536,
        config_values.count(at_least=1),
        "most address ranges in one call to the store (Mooncake's TCP queue holds about 2048)",
    )
    lookup_timeout_s: float = _setting(2.0, config_values.number(above=0), "a lookup that takes longer is a miss")
    lookup_wait_s: float = _setting(0.01, config_values.number(), "longest time a lookup holds up the scheduler thread")
    lookup_chunk_blocks: int = _setting(
        256, config_values.count(at_least=1), "blocks per existence query; stops at the first miss"
    )
    breaker_failures: int = _setting(
        3, config_values.count(at_least=1), "failures in a row after which the store is left alone"
    )
    breaker_open_s: float = _setting(
        5.0, config_values.number(above=0), "how long it is left alone before one probe; doubles"
    )
    max_pinned_fraction: float = _setting(
        0.5, config_values.number(above=0, at_most=1), "most blocks that saves may hold, as a fraction of the KV pool"
    )
    max_pinned_blocks: int | None = _setting(
        None,
        config_values.optional(config_values.count(at_least=1)),
        "a number of blocks, instead of the fraction and without its room for one full request",
    )
    stall_timeout_s: float = _setting(
        10.0,
        config_values.number(above=0),
        "after this long without a report vLLM no longer waits for saves to free blocks",
    )
    quarantine_s: float = _setting(
        120.0,
        config_values.number(above=0),
        "how long blocks stay held after a transfer that may still be moving bytes",
    )
    transfer_timeout_s: float = _setting(
        90.0,
        config_values.number(above=0),
        "a job whose store call has not returned is given up (Mooncake itself gives up at 60 s)",
    )
    load_timeout_s: float = _setting(
        60.0, config_values.number(above=0), "a load that waits longer is failed and recomputed"
    )
    max_store_attempts: int = _setting(3, config_values.count(at_least=1), "tries to save one block")
    retry_backoff_s: float = _setting(
        1.0, config_values.number(above=0), "first wait after the store refused for want of space"
    )
    min_load_tokens: int = _setting(
        0, config_values.count(at_least=0), "hits shorter than this are recomputed instead of loaded"
    )
    max_loads_in_flight: int | None = _setting(
        None,
        config_values.optional(config_values.count(at_least=1)),
        "most requests that load at the same time; not set: no limit",
    )
    shutdown_timeout_s: float = _setting(
        10.0,
        config_values.number(above=0),
        "longest wait for transfers at shutdown; less if vLLM grants its workers less",
    )
    embedded_linger_s: float = _setting(
        30.0, config_values.number(), "how long the embedded store outlives the last engine that uses it"
    )
    embedded_dir: str | None = _setting(
        None,
        config_values.optional(config_values.text),
        "folder of the embedded store's socket and log; another folder is another store",
    )
    trace_dir: str | None = _setting(
        None,
        config_values.optional(config_values.text),
        "folder for a recording of the protocol's events (JSON lines); not set: none",
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    ignored: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """One line for each thing that was given and has no effect."""

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
        """One line per setting (name, value, source), and one for each thing that has no effect."""
        return [
            f"{spec.name} = {getattr(self, spec.name)!r} ({self.sources.get(spec.name, 'default')})"
            for spec in _specs()
        ] + list(self.ignored)


def _specs() -> Iterator["dataclasses.Field[Any]"]:
    return (spec for spec in dataclasses.fields(Settings) if "parse" in spec.metadata)


def reference() -> list[tuple[str, object, str]]:
    """Name, default and meaning of every setting, for documentation."""
    return [(spec.name, spec.default, str(spec.metadata["doc"])) for spec in _specs()]


# -- reading the sources ---------------------------------------------------


def load_settings(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Read and check all sources. Raises ConfigError for the first thing that cannot be used."""
    merged: dict[str, tuple[object, str]] = {}
    services = _service_variables(environ)
    ignored = [f"{', '.join(services)}: ignored, variables of a Kubernetes Service"] if services else []
    for values, source in _sources(extra_config, {k: v for k, v in environ.items() if k not in services}):
        for name, raw in values.items():
            if _is_field(name, raw, source):
                merged[name] = (_parsed(name, raw, source), source)
            else:
                reason = _WITHOUT_MEANING.get(name, "this is what happens anyway")
                ignored.append(f"{name} = {raw!r} ({source}): ignored, {reason}")
    settings = Settings(
        **{name: value for name, (value, _) in merged.items()},  # type: ignore[arg-type]
        sources={name: source for name, (_, source) in merged.items()},
        ignored=tuple(ignored),
    )
    return _checked(settings)


def _service_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that Kubernetes made, and that name no setting."""
    settings = {ENVIRONMENT_PREFIX + spec.name.upper() for spec in _specs()}
    return [
        variable
        for variable, value in sorted(environ.items())
        if variable not in settings
        and (
            _SERVICE_VARIABLE.fullmatch(variable)
            or (_SERVICE_URL_VARIABLE.fullmatch(variable) and _SERVICE_URL.fullmatch(value))
        )
    ]


def _sources(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[Mapping[str, object], str]]:
    """Every source as (values by field, name for messages), weakest first."""
    path = environ.get(CONFIG_PATH_VARIABLE)
    if path is not None:
        yield _read_file(path), f"file {path}"
    for variable, field in MOONCAKE_VARIABLES.items():
        if variable in environ:
            yield {field: config_values.EnvironmentText(environ[variable])}, f"environment variable {variable}"
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(_RESERVED_VARIABLES):
            field = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            yield {field: config_values.EnvironmentText(environ[variable])}, f"environment variable {variable}"
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
    """Whether `name` is a setting; false for what has no effect. Raises ConfigError for anything else."""
    names = [spec.name for spec in _specs()]
    if name in names:
        return True
    if name in _WITHOUT_MEANING:
        return False
    if name in _REFUSED:
        if not _REFUSED[name](raw):
            return False
        raise ConfigError(
            name,
            raw,
            "kvledger does not support this option of the in-tree connector: engines share objects only at the same "
            "tensor_parallel_size; remove it, and run all engines of one store at one size",
            source,
        )
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "no setting has a name like it; remove it"
    raise ConfigError(str(name), raw, f"unknown setting; {hint}", source)


def _parsed(name: str, raw: object, source: str) -> object:
    parse: config_values.Parser = next(spec.metadata["parse"] for spec in _specs() if spec.name == name)
    try:
        return parse(raw)
    except config_values.UnusableError as error:
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
        "metadata_server": settings.metadata_server != config_values.P2P_HANDSHAKE,
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
