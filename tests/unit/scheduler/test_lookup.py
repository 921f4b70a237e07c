"""Lookups: the longest run that every rank has, in few questions; whatever goes wrong is a miss in bounded time."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvledger.keys import KeySpace, parse_key
from kvledger.protocol import Breaker
from kvledger.scheduler.lookup import LookupService

HASHES = [bytes([i]) * 4 for i in range(6)]
KEYS = KeySpace(namespace="ns")
BOUND_S = 30.0


class Store:
    """The two calls of a store client that a lookup makes: `exists` answers by key, may raise, and waits for `gate`."""

    def __init__(self) -> None:
        self.answers: dict[tuple[bytes, int], int] = {}
        """By hash and rank; whatever is not named is there."""
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def exists(self, keys: list[str]) -> list[int]:
        self.asked.append(keys)
        if not self.gate.wait(BOUND_S):
            raise TimeoutError("the gate of a test stayed closed")
        if self.error is not None:
            raise self.error
        return [self.answers.get((parsed.block_hash, parsed.shard), 1) for parsed in map(parse_key, keys)]

    def close(self, timeout_s: float) -> None:
        self.closed = True

    def chunks(self) -> list[list[bytes]]:
        """The hashes of each question, once each."""
        return [list(dict.fromkeys(parse_key(key).block_hash for key in keys)) for keys in self.asked]


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
    store.gate.set()
    for service in made:
        service.close(BOUND_S)
    assert not any(service._thread.is_alive() for service in made)


def found(service: LookupService, hashes: list[bytes] = HASHES, epoch: str = "") -> int | None:
    """The answer to a new question."""
    return service.result(service.ask(hashes, epoch), BOUND_S)


class TestAnswers:
    def test_all_that_was_asked_for(self, store, make_service):
        service = make_service()
        lookup = service.ask(HASHES, "")
        assert service.result(lookup, BOUND_S) == 6
        assert (lookup.missed, lookup.failed) == (None, False)
        assert (service.counters.asked, service.counters.answered, service.counters.keys) == (1, 1, 12)

    @pytest.mark.parametrize("miss", range(6))
    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_blocks_before_the_first_that_some_rank_has_not(self, store, make_service, miss, rank):
        """Later chunks are not asked for."""
        store.answers = {(HASHES[miss], rank): 0, (HASHES[5], 0): 0}
        lookup = (service := make_service()).ask(HASHES, "")
        assert service.result(lookup, BOUND_S) == miss
        assert (lookup.missed, lookup.failed) == (HASHES[miss], False)
        assert store.chunks() == [HASHES[i : i + 2] for i in range(0, miss + 1, 2)]

    def test_an_odd_end_is_a_smaller_chunk(self, store, make_service):
        assert found(make_service(), HASHES[:3]) == 3
        assert store.chunks() == [HASHES[:2], HASHES[2:3]]

    def test_of_nothing_is_nothing(self, store, make_service):
        assert found(make_service(), []) == 0
        assert store.asked == []

    def test_are_about_every_ranks_key_of_the_asked_epoch(self, store, make_service):
        found(make_service(), HASHES[:1], "e1")
        assert store.asked == [
            [KEYS.object_key(shard=rank, group=0, block_hash=HASHES[0], epoch="e1") for rank in (0, 1)]
        ]


class TestFailures:
    def test_an_answer_that_is_a_code_ends_the_run_but_does_not_say_that_the_block_is_missing(
        self, store, make_service
    ):
        store.answers = {(HASHES[3], 1): -900}
        lookup = (service := make_service()).ask(HASHES, "")
        assert service.result(lookup, BOUND_S) == 3
        assert (lookup.missed, lookup.failed) == (None, True)
        assert (service.counters.failed, service.counters.answered) == (1, 0)
        assert len(store.asked) == 2

    def test_an_exception_of_the_client_is_a_miss_and_the_next_lookup_works(self, store, make_service):
        service = make_service()
        store.error = RuntimeError("broke")
        assert found(service) == 0
        assert service.counters.failed == 1
        store.error = None
        assert found(service) == 6

    @pytest.mark.parametrize("how", ["exception", "code", "timeout"])
    def test_in_a_row_open_the_breaker_and_lookups_are_misses_at_once(self, store, make_service, how):
        service = make_service(timeout_s=0.05 if how == "timeout" else BOUND_S, failures=2)
        if how == "exception":
            store.error = RuntimeError("broke")
        elif how == "code":
            store.answers = {(HASHES[0], 0): -900}
        else:
            store.gate.clear()
        for _ in range(2):
            assert service.result(service.ask(HASHES, ""), 0.1 if how == "timeout" else BOUND_S) == 0
        questions = len(store.asked)

        assert service.result(service.ask(HASHES, ""), 0.0) == 0

        assert service.counters.refused == 1
        assert len(store.asked) == questions

    def test_with_a_success_between_them_leave_it_closed(self, store, make_service):
        service = make_service(failures=2)
        for error in (RuntimeError("broke"), None) * 2:
            store.error = error
            assert found(service) == (6 if error is None else 0)
        assert service.counters.refused == 0

    def test_end_with_a_probe_that_works(self, store, make_service):
        service = make_service(failures=1, open_s=0.05)
        store.error = RuntimeError("broke")
        assert found(service) == 0
        store.error = None
        deadline = time.monotonic() + BOUND_S
        while found(service) == 0:
            assert time.monotonic() < deadline
        refused = service.counters.refused
        assert [found(service) for _ in range(3)] == [6, 6, 6]
        assert service.counters.refused == refused


class TestBounds:
    def test_a_result_is_waited_for_no_longer_than_asked(self, store, make_service):
        store.gate.clear()
        lookup = (service := make_service()).ask(HASHES, "")
        begun = time.monotonic()
        assert service.result(lookup, 0.0) is None
        assert service.result(lookup, 0.05) is None
        assert 0.05 <= time.monotonic() - begun < BOUND_S / 2
        store.gate.set()
        assert service.result(lookup, BOUND_S) == 6

    def test_past_its_deadline_a_lookup_is_a_miss_for_good_and_counted_once(self, store, make_service):
        store.gate.clear()
        service = make_service(timeout_s=0.05, failures=1000)
        lookups = []
        while not store.asked:  # a thread that is slow to start leaves a question out
            lookups.append(service.ask(HASHES, ""))
            assert service.result(lookups[-1], 0.1) == 0
        store.gate.set()
        service.close(BOUND_S)  # the store's answer has come by now
        assert service.counters.answered == 1
        assert [service.result(lookup, 0.0) for lookup in lookups] == [0] * len(lookups)
        assert service.counters.timed_out == len(lookups)

    def test_lookups_that_nobody_waits_for_any_more_are_not_asked(self, store, make_service):
        store.gate.clear()
        service = make_service(timeout_s=0.05, failures=100)
        lookups = [service.ask([h], "") for h in HASHES[:3]]
        assert [service.result(lookup, 0.1) for lookup in lookups] == [0, 0, 0]
        store.gate.set()
        service.close(BOUND_S)
        assert store.chunks() in ([], [HASHES[:1]])

    def test_closing_waits_for_a_hung_store_no_longer_than_asked(self, store, make_service):
        store.gate.clear()
        service = make_service()
        service.ask(HASHES, "")
        begun = time.monotonic()
        service.close(0.05)
        assert time.monotonic() - begun < BOUND_S / 2
        assert store.closed
