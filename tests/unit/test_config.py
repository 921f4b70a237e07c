"""Settings: sources and their order, strictness, and errors that name field, value, source and remedy."""

import dataclasses
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm.distributed
from mooncake import mooncake_config

from kvledger import config
from kvledger.config import Settings, load_settings, reference
from kvledger.errors import ConfigError

GIB = 1024**3
VLLM = Path(vllm.distributed.__file__).parent
IN_TREE_OPTION = re.compile(r"""config(?:\.get\(\s*|\[)["'](\w+)["']""")
MASTER = {"master_server_address": "10.0.0.7:50051"}


def settings_file(tmp_path: Path, content: object) -> dict[str, str]:
    path = tmp_path / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return {"MOONCAKE_CONFIG_PATH": str(path)}


def refused(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_settings(extra, environ or {})
    error = caught.value
    assert error.field in str(error)
    assert repr(error.value) in str(error)
    assert error.remedy in str(error)
    assert error.source is not None
    assert error.source in str(error)
    return error


def test_no_configuration_is_the_embedded_store() -> None:
    settings = load_settings({}, {})
    assert settings.embedded_store
    assert (settings.protocol, settings.transfer_mode) == ("tcp", "staged")
    assert (settings.global_segment_size, settings.rank_segment_bytes) == (4 * GIB, 0)
    assert (settings.load_async, settings.lookup_async, settings.enable_lookup) == (True, True, True)
    assert not settings.save_decode_cache


def test_every_setting_has_a_meaning_and_a_default_that_its_own_parser_accepts() -> None:
    for name, default, meaning in reference():
        assert meaning, name
        again = load_settings({name: default}, {})
        assert getattr(again, name) == getattr(load_settings({}, {}), name)


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    environ = settings_file(
        tmp_path, {**MASTER, "protocol": "rdma", "device_name": "a", "cache_prefix": "f", "tenant_id": "t"}
    )
    environ |= {"MOONCAKE_DEVICE": "b", "KVLEDGER_DEVICE_NAME": "c"}
    environ |= {"MOONCAKE_MASTER": "h:1", "KVLEDGER_TENANT_ID": "e"}
    settings = load_settings({"tenant_id": "x"}, environ)
    file = f"file {environ['MOONCAKE_CONFIG_PATH']}"
    assert {name: (getattr(settings, name), source) for name, source in settings.sources.items()} == {
        "protocol": ("rdma", file),
        "cache_prefix": ("f", file),
        "device_name": ("c", "environment variable KVLEDGER_DEVICE_NAME"),
        "master_server_address": ("h:1", "environment variable MOONCAKE_MASTER"),
        "tenant_id": ("x", "kv_connector_extra_config"),
        "transfer_mode": ("direct", "auto, protocol rdma"),
    }
    lines = settings.describe()
    assert "tenant_id = 'x' (kv_connector_extra_config)" in lines
    assert "load_async = True (default)" in lines
    assert "transfer_mode = 'direct' (auto, protocol rdma)" in lines


def test_every_setting_can_come_from_the_environment() -> None:
    values = {bool: "0", int: "1GiB", float: "0.5", str: "x", type(None): ""}
    special = {"protocol": "tcp", "mode": "embedded", "metadata_server": "P2PHANDSHAKE", "transfer_mode": "staged"}
    special |= {"master_server_address": "h:1", "max_batch_bytes": "1MB", "staging_bytes": "1MB"}
    special |= {"weights_digest": "full"}
    for name, default, _ in reference():
        text = special.get(name, values[type(default)])
        if isinstance(default, int) and not isinstance(default, bool) and "bytes" not in name and "size" not in name:
            text = "7"
        environ = {"KVLEDGER_MAX_BATCH_BYTES": "1MB", f"KVLEDGER_{name.upper()}": text}
        assert load_settings({}, environ).sources[name].startswith(("environment", "auto"))


@pytest.mark.parametrize(("variable", "field"), list(config.MOONCAKE_VARIABLES.items()))
def test_mooncakes_own_variables_are_known(variable: str, field: str) -> None:
    special = {"protocol": "tcp", "global_segment_size": "1GB", "metadata_server": "http://m:8080/metadata"}
    text = special.get(field, "host:12")
    settings = load_settings(MASTER, {variable: text})
    if field != "master_server_address":
        assert settings.sources[field] == f"environment variable {variable}"


SIZES: dict[object, int] = {"80GB": 80 * GIB, "4GiB": 4 * GIB, "512MB": GIB // 2, "1TB": 1024 * GIB}
SIZES |= {"1.5 gib": GIB * 3 // 2, "4096": 4096, "7b": 7, "2k": 2048, 4096: 4096}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: object) -> None:
    assert load_settings({"global_segment_size": text}, {}).global_segment_size == SIZES[text]


NO_SIZES = [-1, "-1", "-4GB", True, 1.5, 4e9, None, [], {}, "", "GB", "4 GX", "4PB", "0.3b", "1e9", "nan", "0x10"]
REFUSED: dict[str, list[object]] = {
    "global_segment_size": [*NO_SIZES, "4GB4", "９GB", 0, "0", "0GB", 1 << 60, "9" * 40],
    "load_timeout_s": [-1, 0, float("nan"), float("inf"), -float("inf"), "2", True, None, [], 10**400],
    "max_store_attempts": [0, -3, 1.0, "3", True, None],
    "max_pinned_fraction": [0, 1.01],
    "max_pinned_blocks": [0],
    "min_load_tokens": [-1],
    "mode": [None],
    "tenant_id": [3],
}
REFUSED_IN_ENVIRONMENT = {
    "KVLEDGER_SAVE_DECODE_CACHE": ["", "yes", "off", "2", "None"],
    "KVLEDGER_LOAD_TIMEOUT_S": ["nan", "inf", "-1", "0", "soon", ""],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_values_that_are_refused(field: str, value: object) -> None:
    error = refused({field: value})
    assert error.field == field
    assert "unknown setting" not in error.remedy


@pytest.mark.parametrize(("name", "text"), [(n, text) for n, texts in REFUSED_IN_ENVIRONMENT.items() for text in texts])
def test_values_in_the_environment_that_are_refused(name: str, text: str) -> None:
    refused({}, {name: text})


@pytest.mark.parametrize("value", ["false", "true", "False", 0, 1, None, "", []])
def test_a_flag_in_json_is_a_json_boolean(value: object, tmp_path: Path) -> None:
    assert "true or false" in refused({"load_async": value}).remedy
    assert "true or false" in refused({}, settings_file(tmp_path, {"enable_offload": value})).remedy


@pytest.mark.parametrize("text", ["true", "1", "False", "0", " 0 "])
def test_a_flag_in_the_environment(text: str) -> None:
    assert load_settings({}, {"KVLEDGER_SAVE_DECODE_CACHE": text}).save_decode_cache is (text in ("true", "1"))


def test_numbers_where_zero_means_something() -> None:
    zero = dict.fromkeys(("min_load_tokens", "lookup_wait_s", "embedded_linger_s"), 0)
    settings = load_settings(zero, {})
    assert (settings.min_load_tokens, settings.lookup_wait_s) == (0, 0.0)


NO_ADDRESSES = [
    "host",
    "host:",
    ":1",
    "host:0",
    "host:65536",
    "host:1:2",
    "h ost:1",
    "http://h:1",
    50051,
    "h:1,g:2",
    "h:٣",
    "etcd://",
    "etcd://a",
    "etcd://a:2379;",
    "etcd://a:2379;b",
    "k8s://",
    "redis://a b:1",
    "consul://a:1",
]


@pytest.mark.parametrize("value", NO_ADDRESSES)
def test_addresses_that_are_none(value: object) -> None:
    assert "host:port" in refused({"master_server_address": value}).remedy


ADDRESSES = ["", "10.0.0.7:50051", "[::1]:50051", "master.store_1:65535"]
LOCATORS = ["etcd://a:2379", "etcd://a:2379;[::1]:2379", "k8s://default/mooncake", "redis://:secret@h:6379/0"]


@pytest.mark.parametrize("value", ADDRESSES + LOCATORS)
def test_addresses(value: str) -> None:
    assert load_settings({"master_server_address": value}, {}).master_server_address == (value or None)


def test_metadata_servers() -> None:
    for value in ("P2PHANDSHAKE", "http://10.0.0.7:8080/metadata", "etcd://a:2379;b:2379", "10.0.0.7:2379"):
        assert load_settings({**MASTER, "metadata_server": value}, {}).metadata_server == value
    for value in ("", "p2phandshake", "http://host/metadata", "http://"):
        refused({**MASTER, "metadata_server": value})


@pytest.mark.parametrize(
    ("key", "near"),
    [("load_asynch", "load_async"), ("global_segement_size", "global_segment_size"), ("max_batch", "max_batch_bytes")],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str, tmp_path: Path) -> None:
    assert near in refused({key: 1}).remedy
    assert near in refused({}, settings_file(tmp_path, {key: 1})).remedy
    assert near in refused({}, {f"KVLEDGER_{key.upper()}": "1"}).remedy


def test_an_unknown_key_like_nothing() -> None:
    assert "remove it" in refused({"zzz": 1}).remedy
    refused({3: 1})  # type: ignore[dict-item]
    refused({"sources": {}})


def test_variables_of_tests_and_demo_are_not_settings() -> None:
    load_settings({}, {"KVLEDGER_TEST_DEVICE": "cuda", "KVLEDGER_DEMO_X": "1", "OTHER": "1"})


KUBERNETES = {
    "KVLEDGER_SERVICE_HOST": "10.96.3.7",
    "KVLEDGER_SERVICE_PORT": "80",
    "KVLEDGER_SERVICE_PORT_HTTP": "80",
    "KVLEDGER_PORT": "tcp://10.96.3.7:80",
    "KVLEDGER_PORT_80_TCP": "tcp://10.96.3.7:80",
    "KVLEDGER_PORT_80_TCP_PROTO": "tcp",
    "KVLEDGER_PORT_80_TCP_PORT": "80",
    "KVLEDGER_PORT_80_TCP_ADDR": "10.96.3.7",
    "KVLEDGER_MASTER_SERVICE_HOST": "10.96.3.8",
    "KVLEDGER_MASTER_PORT": "udp://10.96.3.8:53",
    "KVLEDGER_MASTER_PORT_53_UDP_ADDR": "10.96.3.8",
}


def test_variables_of_a_kubernetes_service_do_not_stop_a_start() -> None:
    settings = load_settings({}, {**KUBERNETES, "KVLEDGER_CACHE_PREFIX": "p"})
    assert settings.cache_prefix == "p"
    lines = [line for line in settings.describe() if "Kubernetes" in line]
    assert len(lines) == 1
    assert all(variable in lines[0] for variable in KUBERNETES)
    assert lines == [line for line in settings.attached_to("h:1").describe() if "Kubernetes" in line]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVLEDGER_PORT", "80"),
        ("KVLEDGER_MASTER_PORT", "50051"),
        ("KVLEDGER_SERVICE", "a"),
        ("KVLEDGER_SERVICE_HOSTNAME", "a"),
        ("KVLEDGER_PORT_80", "tcp://10.96.3.7:80"),
        ("KVLEDGER_LOCAL_HOST", "10.0.0.1"),
    ],
)
def test_a_mistyped_variable_is_no_kubernetes_variable(variable: str, value: str) -> None:
    assert variable in str(refused({}, {**KUBERNETES, variable: value}))


# Options that the in-tree MooncakeStoreConnector of vLLM 0.32 and Mooncake's own configuration file document, with
# values that work there, and what becomes of them here: the setting's value, or why it has no effect.
IN_TREE_EXTRA = {
    "load_async": False,
    "lookup_async": False,
    "enable_lookup": False,
    "save_decode_cache": True,
    "preferred_segment": "10.0.0.7:12345",
    "cache_prefix": "team-a",
}
IN_TREE_FILE = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "10.0.0.7:50051",
    "protocol": "rdma",
    "device_name": "mlx5_0",
    "mode": "embedded",
    "global_segment_size": "4GB",
    "local_buffer_size": 1 << 30,
    "enable_offload": True,
    "tenant_id": "team",
    "local_hostname": "10.0.0.9",
}
WITHOUT_MEANING: dict[str, list[object]] = {
    "lookup_rpc_port": [0, 7, "7"],
    "custom_mem_pool": [None, "NVLINK", "BAREX"],
    "enable_group_semantics": ["False", "True", True],
    "enable_cross_layers_blocks": ["False", True],
    "prefill_tp_sizes": [None, [2, 4]],
    "store_tp_size": [None],
    "enable_store_tp_lcm": [False],
    "enable_ssd_offload": [True],
    "ssd_offload_path": ["/nvme"],
    "enable_client_http_server": [False],
    "client_http_port": [9300],
}


@pytest.mark.parametrize("name", [*IN_TREE_FILE, *IN_TREE_EXTRA])
def test_an_option_of_the_in_tree_connector_has_its_meaning_here(name: str, tmp_path: Path) -> None:
    transfers = {"transfer_mode": "staged"}  # synchronous loads need it
    environ = settings_file(tmp_path, {**IN_TREE_FILE, **transfers})
    expected = {**IN_TREE_FILE, **IN_TREE_EXTRA, "global_segment_size": 4 * GIB}[name]
    settings = load_settings(IN_TREE_EXTRA, environ)
    assert getattr(settings, name) == expected
    assert settings.ignored == ()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WITHOUT_MEANING.items() for v in values])
def test_an_option_of_the_in_tree_connector_without_meaning_costs_one_line(
    name: str, value: object, tmp_path: Path
) -> None:
    for settings in (load_settings({name: value}, {}), load_settings({}, settings_file(tmp_path, {name: value}))):
        lines = [line for line in settings.describe() if line.startswith(f"{name} = {value!r} (")]
        assert len(lines) == 1
        assert "): ignored, " in lines[0]


@pytest.mark.parametrize(("name", "value"), [("store_tp_size", 4), ("enable_store_tp_lcm", True)])
def test_an_option_of_the_in_tree_connector_that_changes_what_is_shared_is_refused(name: str, value: object) -> None:
    error = refused({name: value})
    assert error.field == name
    assert "tensor_parallel_size; remove it" in error.remedy


def test_every_option_that_the_installed_in_tree_connector_reads_is_known_here() -> None:
    """The words that its files ask its two configurations for; a new release may bring more."""
    found = set(IN_TREE_OPTION.findall((VLLM / "mooncake_store.py").read_text(encoding="utf-8")))
    for file in (VLLM / "kv_transfer/kv_connector/v1/mooncake/store").glob("*.py"):
        found |= set(IN_TREE_OPTION.findall(file.read_text(encoding="utf-8")))
    assert {"lookup_rpc_port", "load_async", "store_tp_size", "protocol"} <= found
    assert found <= {*IN_TREE_FILE, *IN_TREE_EXTRA, *WITHOUT_MEANING}


def test_choices_name_what_is_allowed() -> None:
    assert "'tcp', 'rdma'" in refused({"protocol": "TCP"}).remedy
    assert "did you mean 'nvlink'" in refused({"protocol": "nvlnk"}).remedy
    refused({**MASTER, "protocol": "rpc_only"})  # Mooncake knows it, and it moves no bytes
    assert "did you mean 'staged'" in refused({"transfer_mode": "stagd"}).remedy


def test_the_tenant_as_in_tree() -> None:
    for value in (None, "", "  "):
        assert load_settings({"tenant_id": value}, {}).tenant_id == "default"


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "not valid JSON"), ("[1]", "one JSON object"), ("3", "one JSON object"), ('{"a": 1, "a": 2}', "twice")],
)
def test_files_that_are_no_settings(content: str, told: str, tmp_path: Path) -> None:
    environ = settings_file(tmp_path, content)
    error = refused({}, environ)
    assert told in error.remedy
    assert environ["MOONCAKE_CONFIG_PATH"] in str(error)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (str(tmp_path / "absent.json"), str(tmp_path), ""):
        assert refused({}, {"MOONCAKE_CONFIG_PATH": path}).value == path
    (tmp_path / "latin").write_bytes(b'{"cache_prefix": "\xe9"}')
    refused({}, {"MOONCAKE_CONFIG_PATH": str(tmp_path / "latin")})


def test_an_in_tree_file_works_unchanged(tmp_path: Path) -> None:
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "10.0.0.7:50051",
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "4GB",
        "enable_offload": True,
        "tenant_id": "default",
    }
    settings = load_settings({"load_async": True, "lookup_rpc_port": 0}, settings_file(tmp_path, content))
    assert (settings.rank_segment_bytes, settings.local_buffer_size) == (0, 4 * GIB)
    assert settings.enable_offload


def test_who_gives_memory() -> None:
    assert load_settings(MASTER, {}).rank_segment_bytes == 4 * GIB
    alone = load_settings({**MASTER, "mode": "standalone-store"}, {})
    assert (alone.rank_segment_bytes, alone.global_segment_size) == (0, 0)
    sized = load_settings({**MASTER, "mode": "standalone-store", "global_segment_size": "1GB"}, {})
    assert sized.global_segment_size == 0
    refused({**MASTER, "global_segment_size": 0})


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "standalone-store"), ("protocol", "rdma"), ("metadata_server", "h:1"), ("enable_offload", True)],
)
def test_what_needs_a_cluster(field: str, value: object) -> None:
    error = refused({field: value})
    assert error.field == field
    assert "master_server_address" in error.remedy
    load_settings({**MASTER, field: value}, {})


def test_every_protocol_of_mooncake_is_accepted_and_only_tcp_is_staged_by_itself() -> None:
    known = mooncake_config._KNOWN_PROTOCOLS - {"rpc_only"}
    assert {"tcp", "rdma", "efa", "ascend", "nvlink", "barex"} <= known
    for protocol in known:
        settings = load_settings({**MASTER, "protocol": protocol}, {})
        assert (settings.protocol, settings.transfer_mode) == (protocol, "staged" if protocol == "tcp" else "direct")


def test_what_must_fit_together() -> None:
    assert refused({"staging_bytes": "1MB"}).field == "staging_bytes"
    assert refused({"load_async": False, "transfer_mode": "direct"}).field == "load_async"
    assert refused({**MASTER, "load_async": False, "protocol": "rdma"}).field == "load_async"
    load_settings({**MASTER, "load_async": False, "protocol": "rdma", "transfer_mode": "staged"}, {})
    load_settings({"load_async": False}, {})
    assert refused({"lookup_wait_s": 3, "lookup_timeout_s": 2}).field == "lookup_wait_s"


def test_attached_to_an_embedded_store_a_rank_gives_no_memory() -> None:
    attached = load_settings({"cache_prefix": "p"}, {}).attached_to("127.0.0.1:5")
    assert not attached.embedded_store
    assert attached.rank_segment_bytes == 0
    assert attached.local_hostname == "127.0.0.1"
    assert "master_server_address = '127.0.0.1:5' (embedded store)" in attached.describe()


def test_settings_are_values() -> None:
    settings = load_settings({"cache_prefix": "p"}, {})
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.sources == settings.sources
    assert settings != Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.cache_prefix = "q"  # type: ignore[misc]
