"""A Mooncake store client that cannot hang a start, cannot be called after its end, and never believes a short answer.

What may live here: the one native handle of a process role, and what guards it. No retries, no policy, no KV layout.
Invariants: once `close` has begun no native call starts (Mooncake's handle crashes the process when used after its
close); the native close runs only when no call is in flight, otherwise the handle is left open for the life of the
process; a result list that is not exactly one number per key counts as indeterminate for every key.

Facts about Mooncake 0.3.13 that shape this: its `setup` and `close` keep Python's interpreter lock, so nothing in this
process runs meanwhile and no timeout can be put around them. Hence the probe before `setup` (an address that accepts
connections without being a master holds `setup` for ten minutes) and before `close` (a client that gave memory waits
about 15 s for a master that is gone). An interpreter that ends while a thread is in a native call is aborted when that
call returns. Removal skips objects that were read or asked for within the key lease (10 s by default). A tenant is
ignored by a master without --enable_multi_tenants. Memory of the same process is reached by memcpy, of another one over
TCP; kvledger sets none of Mooncake's environment variables.
"""

import atexit
import ctypes
import importlib
import importlib.metadata
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvledger.config import Settings
from kvledger.config_values import endpoints, is_locator
from kvledger.errors import ConfigError, StoreError
from kvledger.mooncake.codes import Code, describe
from kvledger.observe.faults import Faults

logger = logging.getLogger(__name__)

MINIMUM_VERSION = (0, 3, 13)
CONNECT_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 5.0  # with a dead master a call returns after about 4.3 s
HEALTHY, CLOSED, UNREACHABLE = 0, 1, 2  # what `health` answers, as Mooncake does

# Every wheel of Mooncake; a build from source has the first name. All bring the same package, so only one can be used.
_ANY_BUILD = "mooncake-transfer-engine"
_DISTRIBUTIONS = (
    _ANY_BUILD,  # on PyPI: CUDA 12
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-cuda13",
    "mooncake-transfer-engine-efa-non-cuda",
    "mooncake-transfer-engine-rocm",
    "mooncake-transfer-engine-musa",
    "mooncake-transfer-engine-npu",
)
_CUDA_DISTRIBUTIONS = {"12": "mooncake-transfer-engine", "13": "mooncake-transfer-engine-cuda13"}
# Protocols that have wheels of their own; elsewhere Mooncake takes another one, or needs 22 s to say no.
_FLAVOUR_OF_PROTOCOL = {"efa": "efa", "ascend": "npu", "hip": "rocm", "musa": "musa"}
_ANYWHERE = "192.0.2.1:9"  # reserved for documentation: stands for "over the default route"
_NEEDED_METHODS = (
    "setup",
    "close",
    "register_buffer",
    "unregister_buffer",
    "batch_is_exist",
    "batch_put_from",
    "batch_put_from_multi_buffers",
    "batch_get_into",
    "batch_get_into_multi_buffers",
    "remove_by_regex",
    "health_check",
)
# A request for a function that no master has: magic, version, serialisation, type, sequence, function, two lengths.
# A master answers "not registered"; whatever else is listening stays silent or answers in another language.
_PROBE = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0xFFFF_FFFF, 0, 0)


class StoreClient(Protocol):
    """What ranks and lookups need of a store. Every list has one entry per key; `codes.py` says what entries mean."""

    def exists(self, keys: list[str]) -> list[int]:
        """1 stored and complete, 0 not, negative: a code."""

    def put(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Store each object as the concatenation of its segments. 0, or a code; never replaces an object."""

    def get(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Read each object into its segments. The bytes that were read (the caller compares), or a code."""

    def register(self, ptr: int, size: int) -> None:
        """Make memory known to the transfer engine. Raises StoreError if that fails."""

    def unregister(self, ptr: int) -> None:
        """Undo `register`; harmless after `close`."""

    def remove_by_prefix(self, prefix: str, *, force: bool = False) -> int:
        """Remove every object whose key starts so, except those being read or copied unless `force`. How many, or a code."""

    def health(self) -> int:
        """0 healthy, 1 closed, 2 the master does not answer. Does not wait."""

    def close(self, timeout_s: float) -> None:
        """End all use; waits at most about `timeout_s` for calls in flight. May be repeated."""


class MooncakeClient:
    """StoreClient on a real Mooncake handle. Thread-safe. Made by `connect`."""

    def __init__(self, *, name: str) -> None:
        """A client that is not connected: every call answers as if it were closed."""
        self.name = name
        self._native: Any = None
        self._replicate: Any = None
        self._master = ""
        self._segment_bytes = 0
        self._in_flight = 0
        self._closing = True
        self._changed = threading.Condition()
        self._faults = Faults(name)

    @classmethod
    def connect(
        cls,
        settings: Settings,
        *,
        segment_bytes: int,
        name: str,
        buffer_bytes: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> "MooncakeClient":
        """Join the store at `settings.master_server_address`, giving it `segment_bytes` of this process's memory.

        `name` is for logs. `buffer_bytes` overrides `local_buffer_size`; 0 suits a client that only looks up.
        Raises StoreError, within about `connect_timeout_s` if the master cannot be reached.
        """
        if settings.master_server_address is None:
            raise StoreError("setup", None, "no master address is known; call ensure_embedded first and attach to it")
        module = import_store()
        check_protocol(settings.protocol, installed_distribution())
        check_master(settings.master_server_address, connect_timeout_s)
        client = cls(name=name)
        buffer = settings.local_buffer_size if buffer_bytes is None else buffer_bytes
        client._setup(module, settings, settings.master_server_address, segment_bytes, buffer)
        return client

    def _setup(self, module: Any, settings: Settings, master: str, segment_bytes: int, buffer_bytes: int) -> None:
        native = module.MooncakeDistributedStore()
        hostname = settings.local_hostname or local_address_towards(master)
        extra: dict[str, object] = {}
        if settings.tenant_id != "default":
            extra["tenant_id"] = settings.tenant_id
        if settings.enable_offload and segment_bytes:
            extra["enable_ssd_offload"] = True
        try:
            code = native.setup(
                local_hostname=hostname,
                metadata_server=settings.metadata_server,
                global_segment_size=segment_bytes,
                local_buffer_size=buffer_bytes,
                protocol=settings.protocol,
                rdma_devices=settings.device_name,
                master_server_addr=master,
                **extra,
            )
        except Exception as error:
            raise StoreError("setup", None, f"{error}; {_setup_remedy(settings, hostname, segment_bytes)}") from error
        if code != 0:
            _end_quietly(native)
            remedy = _setup_remedy(settings, hostname, segment_bytes)
            raise StoreError("setup", int(code), f"{describe(int(code))}; {remedy}")
        if is_locator(master) and (health := int(native.health_check())) != HEALTHY:
            _end_quietly(native)
            raise StoreError("health_check", health, f"no master is found through {master}; start one, or correct it")
        self._replicate = _replicate_config(module, settings)
        self._native, self._master, self._segment_bytes = native, master, segment_bytes
        self._closing = False
        logger.info(
            "kvledger %s joined the Mooncake store at %s as %s: %s, segment %d bytes, buffer %d bytes",
            self.name, master, native.get_hostname(), settings.protocol, segment_bytes, buffer_bytes,
        )  # fmt: skip

    # -- operations --------------------------------------------------------

    def exists(self, keys: list[str]) -> list[int]:
        """See StoreClient."""
        if not keys or not self._enter():
            return [int(Code.CLIENT_CLOSED)] * len(keys)
        try:
            return _one_per_key(self._faults, "exists", self._native.batch_is_exist(keys), len(keys))
        finally:
            self._leave()

    def put(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """See StoreClient. An exception of Mooncake's passes through: the caller must treat it as indeterminate."""
        _check_shape("put", keys, ptrs, sizes)
        if not keys or not self._enter():
            return [int(Code.CLIENT_CLOSED)] * len(keys)
        try:
            if all(len(one) == 1 for one in ptrs):
                answer = self._native.batch_put_from(keys, [p[0] for p in ptrs], [s[0] for s in sizes], self._replicate)
            else:
                answer = self._native.batch_put_from_multi_buffers(keys, ptrs, sizes, self._replicate)
            return _one_per_key(self._faults, "put", answer, len(keys), highest=0)
        finally:
            self._leave()

    def get(self, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """See StoreClient. An exception of Mooncake's passes through: the caller must treat it as indeterminate."""
        _check_shape("get", keys, ptrs, sizes)
        if not keys or not self._enter():
            return [int(Code.CLIENT_CLOSED)] * len(keys)
        try:
            if all(len(one) == 1 for one in ptrs):
                answer = self._native.batch_get_into(keys, [p[0] for p in ptrs], [s[0] for s in sizes])
            else:
                answer = self._native.batch_get_into_multi_buffers(keys, ptrs, sizes)
            return _one_per_key(self._faults, "get", answer, len(keys))
        finally:
            self._leave()

    def register(self, ptr: int, size: int) -> None:
        """See StoreClient."""
        if not self._enter():
            raise StoreError("register_buffer", int(Code.CLIENT_CLOSED), "the client is closed; connect a new one")
        try:
            code = int(self._native.register_buffer(ptr, size))
        finally:
            self._leave()
        if code != 0:
            raise StoreError(
                "register_buffer",
                code,
                f"{describe(code)}; {size} bytes at {ptr:#x}: the memory must be allocated, not registered already "
                "and, for rdma, lockable (ulimit -l) and reachable by the device",
            )

    def unregister(self, ptr: int) -> None:
        """See StoreClient."""
        if not self._enter():
            return
        try:
            code = int(self._native.unregister_buffer(ptr))
        finally:
            self._leave()
        if code != 0:
            logger.warning("kvledger %s: unregister of %#x: %s", self.name, ptr, describe(code))

    def remove_by_prefix(self, prefix: str, *, force: bool = False) -> int:
        """See StoreClient."""
        if not prefix:
            raise StoreError("remove_by_regex", None, "an empty prefix would remove everybody's objects; name a prefix")
        if not self._enter():
            return int(Code.CLIENT_CLOSED)
        try:
            return int(self._native.remove_by_regex(prefix_pattern(prefix), force))
        finally:
            self._leave()

    def health(self) -> int:
        """See StoreClient."""
        if not self._enter():
            return CLOSED
        try:
            return int(self._native.health_check())
        finally:
            self._leave()

    # -- the end -----------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """See StoreClient. The native close itself takes 1 to 2 s more."""
        with self._changed:
            self._closing = True
            native, self._native = self._native, None
            if native is None:
                return
            idle = self._changed.wait_for(lambda: self._in_flight == 0, timeout=max(0.0, timeout_s))
            in_flight = self._in_flight
        if not idle:
            _leak(native)
            atexit.register(self._await_stragglers)
            logger.error(
                "kvledger %s: %d store calls still run %.1f s after close began; the Mooncake handle stays open until "
                "the process ends",
                self.name, in_flight, timeout_s,
            )  # fmt: skip
        elif self._segment_bytes and not _reaches_master(native, self._master, min(1.0, max(0.1, timeout_s))):
            _leak(native)
            logger.warning(
                "kvledger %s: the master at %s does not answer; the Mooncake handle stays open until the process ends",
                self.name, self._master,
            )  # fmt: skip
        else:
            _close_native(native, self.name)

    def _await_stragglers(self) -> None:
        """At exit: a call that comes back from Mooncake while Python is being torn down aborts the process."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0, timeout=EXIT_TIMEOUT_S)

    def _enter(self) -> bool:
        with self._changed:
            if self._closing:
                return False
            self._in_flight += 1
            return True

    def _leave(self) -> None:
        with self._changed:
            self._in_flight -= 1
            if not self._in_flight:
                self._changed.notify_all()


# -- answers ---------------------------------------------------------------


def _one_per_key(faults: Faults, operation: str, answer: Any, keys: int, *, highest: int | None = None) -> list[int]:
    """The answer if it is one number per key, else "indeterminate" for every key."""
    whole = isinstance(answer, list) and len(answer) == keys and all(type(entry) is int for entry in answer)
    if whole and (highest is None or all(entry <= highest for entry in answer)):
        return list(answer)
    meaning = f"Mooncake answered {answer!r:.200} for {keys} keys; all count as indeterminate"
    faults.record(f"{operation} malformed answer", meaning, level=logging.ERROR)
    return [int(Code.TRANSFER_FAIL)] * keys


def _check_shape(operation: str, keys: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> None:
    if not len(keys) == len(ptrs) == len(sizes):
        raise ValueError(f"{operation}: {len(keys)} keys, {len(ptrs)} pointer lists, {len(sizes)} size lists")
    for key, pointers, lengths in zip(keys, ptrs, sizes, strict=True):
        if not pointers or len(pointers) != len(lengths):
            raise ValueError(f"{operation}: {len(pointers)} pointers and {len(lengths)} sizes for key {key!r}")


def prefix_pattern(prefix: str) -> str:
    """The regular expression (ECMAScript, as Mooncake reads it) for keys that start with exactly `prefix`."""
    return "^" + re.sub(r"[^A-Za-z0-9_]", lambda found: "\\" + found[0] if found[0].isascii() else found[0], prefix)


# -- the native library ----------------------------------------------------


def import_store(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """The module `mooncake.store`, if it is installed, loads, and is new enough. Raises StoreError with the remedy."""
    try:
        module = load("mooncake.store")
    except ImportError as error:
        raise StoreError("import", None, _import_remedy(str(error))) from error
    _check_version(module, installed_version())
    return module


def _import_remedy(message: str) -> str:
    wanted = ".".join(map(str, MINIMUM_VERSION))
    if "libibverbs" in message:
        return (
            "Mooncake needs the system library libibverbs.so.1, also for TCP; "
            f"install the Debian/Ubuntu package libibverbs1 ({message})"
        )
    if cuda := re.search(r"libcudart\.so\.(\d+)", message):
        others = [name for major, name in _CUDA_DISTRIBUTIONS.items() if major != cuda[1]]
        return (
            f"the installed Mooncake is built for CUDA {cuda[1]}, which is not here; uninstall it and install the one "
            f"for this CUDA: {' or '.join(others)} >= {wanted} (pip install 'kvledger[cuda12]' or 'kvledger[cuda13]', "
            f"by the CUDA of torch.version.cuda), or mooncake-transfer-engine-non-cuda with staged transfers ({message})"
        )
    if "libcuda.so" in message:
        return (
            "the installed Mooncake needs the NVIDIA driver's libcuda.so.1; make the driver visible here (for a "
            f"container: --gpus), or install mooncake-transfer-engine-non-cuda instead ({message})"
        )
    if "No module named 'mooncake" in message:
        return f"install mooncake-transfer-engine (CUDA 12), -cuda13 or -non-cuda >= {wanted} ({message})"
    return f"the installed Mooncake package does not load ({message})"


def installed_distribution(version_of: Callable[[str], str] = importlib.metadata.version) -> tuple[str, str] | None:
    """Name and version of the installed Mooncake distribution; None for a build that pip does not know.

    `version_of` raises PackageNotFoundError for what is not installed.
    """
    for distribution in _DISTRIBUTIONS:
        try:
            return distribution, version_of(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_version() -> str | None:
    """The version of the installed Mooncake distribution, whatever it is called."""
    if known := installed_distribution():
        return known[1]
    for distribution in importlib.metadata.packages_distributions().get("mooncake", []):
        return importlib.metadata.version(distribution)
    return None


def check_protocol(protocol: str, distribution: tuple[str, str] | None) -> None:
    """Raise ConfigError if `protocol` has wheels of its own and the installed wheel is not one of them."""
    flavour = _FLAVOUR_OF_PROTOCOL.get(protocol)
    if flavour is None or distribution is None or distribution[0] == _ANY_BUILD:
        return
    if flavour not in distribution[0].removeprefix(_ANY_BUILD).split("-"):
        wheels = [name for name in _DISTRIBUTIONS if flavour in name.split("-")]
        raise ConfigError(
            field="protocol",
            value=protocol,
            remedy=f"{distribution[0]} {distribution[1]} is built without it; install {' or '.join(wheels)} in its "
            "place, or use 'tcp' or 'rdma'",
        )


def check_direct(device_type: str, distribution: tuple[str, str] | None) -> None:
    """Raise ConfigError if the installed Mooncake cannot move bytes from and to memory of this device.

    A wheel without CUDA would register a device's address as if it were the host's.
    """
    if device_type == "cpu" or distribution is None or not distribution[0].endswith("-non-cuda"):
        return
    raise ConfigError(
        field="transfer_mode",
        value="direct",
        remedy=f"{distribution[0]} {distribution[1]} cannot address {device_type} memory; set transfer_mode to "
        f"'staged', or install {' or '.join(_CUDA_DISTRIBUTIONS.values())} (by CUDA major) in its place",
    )


def _check_version(module: Any, version: str | None) -> None:
    wanted = ".".join(map(str, MINIMUM_VERSION))
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if numbers is not None and tuple(map(int, numbers.groups())) < MINIMUM_VERSION:
        raise StoreError("import", None, f"Mooncake {version} is too old; install mooncake-transfer-engine >= {wanted}")
    missing = [method for method in _NEEDED_METHODS if not hasattr(module.MooncakeDistributedStore, method)]
    if missing:
        raise StoreError(
            "import",
            None,
            f"Mooncake {version} lacks {', '.join(missing)}; install mooncake-transfer-engine >= {wanted}",
        )


def _replicate_config(module: Any, settings: Settings) -> Any:
    config = module.ReplicateConfig()
    if settings.preferred_segment:
        config.preferred_segment = settings.preferred_segment
    return config


def _setup_remedy(settings: Settings, hostname: str, segment_bytes: int) -> str:
    build = " ".join(installed_distribution() or ("Mooncake",))
    asked = [settings.protocol] if settings.protocol not in ("tcp", "rdma") else []
    if is_locator(settings.master_server_address or ""):
        asked.append(f"{settings.master_server_address} in master_server_address")
    built = (
        f"the installed {build} may be built without {' or '.join(asked)}: use another build or value; "
        if asked
        else ""
    )
    return built + (
        f"check local_hostname ({hostname}), protocol ({settings.protocol}), device_name ({settings.device_name!r}), "
        f"metadata_server ({settings.metadata_server}), the memory for a segment of {segment_bytes} bytes"
        + (" and MOONCAKE_OFFLOAD_FILE_STORAGE_PATH" if settings.enable_offload else "")
    )


def _end_quietly(native: Any) -> None:
    """Close a handle whose set-up failed; its own failure must not hide the first one."""
    try:
        native.close()
    except Exception:
        logger.debug("closing a half-built Mooncake handle failed", exc_info=True)


def _close_native(native: Any, name: str) -> None:
    begin = time.monotonic()
    try:
        code = int(native.close())
    except Exception:
        logger.exception("kvledger %s: closing the Mooncake handle failed", name)
        return
    if code != 0:
        logger.warning("kvledger %s: closing the Mooncake handle: %s", name, describe(code))
    logger.debug("kvledger %s left the Mooncake store in %.1f s", name, time.monotonic() - begin)


def _leak(native: Any) -> None:
    """Keep the handle alive for ever: its destructor would close it under a running call."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


# -- the master's address --------------------------------------------------


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def local_address_towards(address: str) -> str:
    """The address of this host that the master at `address` sees; for a locator, that its registry sees."""
    known = address.startswith("etcd://")
    host, port = split_address((endpoints(address)[0] if known else _ANYWHERE) if is_locator(address) else address)
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # a datagram socket: sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError("setup", None, f"no route to the master at {address} ({error}); set local_hostname") from error


def check_master(address: str, timeout_s: float) -> None:
    """Raise StoreError unless something at `address` answers like a Mooncake master within `timeout_s`.

    Behind a locator only Mooncake itself finds the master. It asks etcd for 100 s, so etcd must at least be there.
    """
    if is_locator(address):
        _check_registry(address, timeout_s)
        return
    remedy = "start the master there, or correct master_server_address"
    try:
        answer = _probe(address, timeout_s)
    except TimeoutError as error:
        raise StoreError(
            "setup",
            None,
            f"nothing at {address} answered as a Mooncake master within {timeout_s:g} s; is the port its RPC port (not "
            f"its metrics or metadata port)? {remedy}",
        ) from error
    except OSError as error:
        raise StoreError("setup", None, f"no Mooncake master at {address} ({error}); {remedy}") from error
    if answer.startswith(b"HTTP/"):
        raise StoreError("setup", None, f"{address} is an HTTP server, not the master's RPC port; {remedy}")


def _check_registry(locator: str, timeout_s: float) -> None:
    if not locator.startswith("etcd://"):
        return
    failures = []
    for endpoint in endpoints(locator):
        try:
            with socket.create_connection(split_address(endpoint), timeout=timeout_s):
                return
        except OSError as error:
            failures.append(f"{endpoint}: {error}")
    raise StoreError(
        "setup", None, f"no etcd at {locator} ({'; '.join(failures)}); start it, or correct master_server_address"
    )


def _reaches_master(native: Any, address: str, timeout_s: float) -> bool:
    """Whether a client's native close would find its master."""
    if is_locator(address):
        return int(native.health_check()) == HEALTHY
    return master_answers(address, timeout_s)


def master_answers(address: str, timeout_s: float) -> bool:
    """Whether a master at `address` answers within `timeout_s`; opening and closing the connection is no answer."""
    try:
        answer = _probe(address, timeout_s)
    except OSError:
        return False
    return bool(answer) and not answer.startswith(b"HTTP/")


def _probe(address: str, timeout_s: float) -> bytes:
    """Ask for a function that does not exist; answers what comes back, nothing if the connection is closed instead."""
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
        connection.sendall(_PROBE)
        connection.settimeout(max(0.05, deadline - time.monotonic()))
        return connection.recv(64)
