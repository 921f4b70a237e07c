"""A real store and ranks on it, for the tests of the rank side."""

from collections.abc import Iterator

import pytest

from kvledger.keys import KeySpace
from kvledger.mooncake.embedded import EmbeddedStore, running_embedded
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
