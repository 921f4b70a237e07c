"""Lookups that fail: one counter each, one line a kind, and a dead thread holds nobody up."""

import time
from collections.abc import Callable, Iterator

import pytest

from kvledger.protocol import Breaker
from kvledger.scheduler.lookup import RESTARTS, LookupService
from tests.support.lookups import BOUND_S, HASHES, KEYS, Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make_service(store) -> Iterator[Callable[..., LookupService]]:
    """Makes services on the store: 2 ranks, chunks of 2 blocks, and a breaker that stays open once it is."""
    made = []

    def make(*, timeout_s: float = BOUND_S, failures: int = 3, open_s: float = 600.0) -> LookupService:
        breaker = Breaker(threshold=failures, initial_s=open_s, max_s=open_s)
        made.append(
            LookupService(client=store, keys=KEYS, shards=2, chunk_blocks=2, timeout_s=timeout_s, breaker=breaker)
        )
        return made[-1]

    yield make
    store.works.set()
    for service in made:
        service.close(BOUND_S)
    assert not any(service._thread.is_alive() for service in made)


def found(service: LookupService, hashes: list[bytes] = HASHES, epoch: str = "") -> int | None:
    """The answer to a new question."""
    return service.result(service.ask(hashes, epoch), BOUND_S)


class TestSilence:
    @pytest.mark.parametrize(
        ("answers", "kind"),
        [([], "exists wrong length"), (None, "exists wrong length"), ([-900] * 4, "exists RPC_FAIL")],
    )
    def test_whatever_fails_raises_one_counter(self, store, make_service, answers, kind):
        service = make_service()
        store.exists = lambda keys: answers
        assert found(service, HASHES[:2]) == 0
        assert list(service.counters.faults) == [kind]
        assert service.counters.failed == 1

    def test_a_timeout_raises_one_counter(self, store, make_service):
        store.works.clear()
        service = make_service(timeout_s=0.05)
        assert service.result(service.ask(HASHES, ""), 0.1) == 0
        assert service.counters.faults == {"lookup timed out": 1}

    def test_the_breakers_transitions_are_counted(self, store, make_service):
        service = make_service(failures=1)
        store.error = RuntimeError("broke")
        found(service)
        assert service.counters.breakers == {"lookup breaker opened": 1}
        assert service.counters.faults == {"exists RuntimeError": 1}

    def test_a_thread_that_dies_answers_and_goes_on(self, store, make_service, caplog):
        service = make_service()
        store.error = SystemExit("out")
        assert found(service) == 0
        store.error = None
        assert found(service) == 6
        assert service.counters.faults == {"lookup thread died": 1}
        assert "SystemExit: out" in caplog.text

    def test_a_thread_that_dies_too_often_in_a_row_makes_every_lookup_a_miss_at_once_and_says_so_once(
        self, store, make_service, caplog
    ):
        service = make_service()
        store.error = SystemExit("out")
        for _ in range(RESTARTS + 1):
            assert found(service) == 0
        service._thread.join(BOUND_S)
        asked = len(store.asked)
        store.error = None

        assert [service.result(service.ask(HASHES, ""), 0.0) for _ in range(3)] == [0, 0, 0]

        assert len(store.asked) == asked
        assert not service.alive()
        assert service.counters.dead == 3
        assert service.counters.faults["lookup thread ended"] == 1
        assert [m.count("every lookup is a miss") for m in caplog.messages].count(1) == 1

    def test_those_that_wait_when_it_dies_for_good_are_answered(self, store, make_service):
        service = make_service()
        store.error = SystemExit("out")
        for _ in range(RESTARTS):
            found(service)
        store.works.clear()
        waiting = [service.ask(HASHES, "") for _ in range(3)]
        store.works.set()
        assert [service.result(lookup, BOUND_S / 2) for lookup in waiting] == [0, 0, 0]
        assert service.counters.timed_out == 0

    def test_closing_takes_no_longer_than_vllm_grants_however_long_the_setting(self, store, make_service):
        store.works.clear()
        service = make_service()
        service.ask(HASHES, "")
        begun = time.monotonic()
        service.close(600.0)
        assert time.monotonic() - begun < 2.5
        assert store.closed_in is not None
