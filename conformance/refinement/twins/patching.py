"""How a bug is put into kvledger for the length of a block; a name that is gone is an error."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Patch = Callable[[], AbstractContextManager[Any]]


def named_patch(table: dict[str, Patch], name: str) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Notes a generator that patches for the length of a block under a name."""

    def note(function: Callable[[], Iterator[None]]) -> Patch:
        patch = contextlib.contextmanager(function)
        table[name] = patch
        return patch

    return note


def swap(owner: Any, name: str, new: Any) -> Any:
    """Another value for a name that exists, for the length of a block."""
    return mock.patch.object(owner, name, new)
