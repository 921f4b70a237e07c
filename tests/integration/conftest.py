"""A real store, and ranks and engines on it."""

import contextlib
from collections.abc import Iterator

import pytest

from kvledger.keys import KeySpace
from kvledger.mooncake.embedded import EmbeddedStore, running_embedded
from tests.support.live import live_engine
from tests.support.ranks import Rank


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[EmbeddedStore]:
    with running_embedded(tmp_path_factory.mktemp("store"), 64 << 20) as running:
        yield running


@pytest.fixture
def keys(request) -> KeySpace:
    return KeySpace(namespace="ns", cache_prefix=request.node.name)


@pytest.fixture
def make_rank(store, keys):
    made: list[Rank] = []

    def make(**kwargs) -> Rank:
        made.append(Rank(store, keys, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.side.close()


@pytest.fixture
def engines(store, request):
    """Makes engines that share one key space (per test) and one store."""
    with contextlib.ExitStack() as stack:
        yield lambda **facts: stack.enter_context(live_engine(store, cache_prefix=request.node.name, **facts))
