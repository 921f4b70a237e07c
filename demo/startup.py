"""How a process comes up faster: most of what it makes then stays to its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """Importing vLLM makes a million objects that stay. Python would go through all of them again and again for
    garbage, which takes a quarter of the time; what was made here is left out of later searches, too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
