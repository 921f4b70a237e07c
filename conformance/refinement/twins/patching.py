"""How a bug is put into kvledger for the length of a block; a name that is gone is an error."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Patch = Callable[[], AbstractContextManager[None]]
Swap = tuple[Any, str, Any]
"""An owner, one of its names, and what that name means meanwhile."""


def named_patch(table: dict[str, Patch], name: str) -> Callable[[Callable[[], Iterator[Swap]]], Patch]:
    """Notes, under a name, the patch that consists of the swaps a function yields."""

    def note(function: Callable[[], Iterator[Swap]]) -> Patch:
        @contextlib.contextmanager
        @functools.wraps(function)
        def patch() -> Iterator[None]:
            with contextlib.ExitStack() as swaps:
                for owner, attribute, new in function():
                    swaps.enter_context(mock.patch.object(owner, attribute, new))
                yield

        table[name] = patch
        return patch

    return note
