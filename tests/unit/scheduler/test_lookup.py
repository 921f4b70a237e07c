"""Lookups: the longest run that every rank has, in few questions; whatever goes wrong is a miss in bounded time."""

import time
from collections.abc import Iterator
from typing import cast

import pytest

from kvledger.mooncake.client import StoreClient
from kvledger.protocol import Breaker
from kvledger.scheduler.lookup import Lookup, LookupService
from tests.support.lookups import BOUND_S, HASHES, KEYS, Store

TIMEOUT_S, OPEN_S = 10.0, 60.0


class World:
    """A lookup service (2 ranks, chunks of 2 blocks, a breaker that opens at the second failure), its store, its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Store()
        self.service = LookupService(
            client=cast(StoreClient, self.store),
            keys=KEYS,
            shards=2,
            chunk_blocks=2,
            timeout_s=TIMEOUT_S,
            breaker=Breaker(threshold=2, initial_s=OPEN_S, max_s=OPEN_S),
            clock=lambda: self.now,
        )

    def ask(self, hashes: list[bytes] = HASHES, epoch: str = "") -> tuple[Lookup, int | None]:
        """A new question and its answer."""
        lookup = self.service.ask(hashes, epoch)
        return lookup, self.service.result(lookup, BOUND_S)

    def fail(self, how: str) -> None:
        """One lookup fails. After a timeout the store still hangs."""
        if how == "timeout":
            self.store.works.clear()
            lookup = self.service.ask(HASHES, "")
            self.now += TIMEOUT_S
            assert self.service.result(lookup, 0.0) == 0
            return
        self.store.error = RuntimeError("broke") if how == "exception" else None
        self.store.answers = {(HASHES[0], 0): -900} if how == "code" else {}
        assert self.ask()[1] == 0
        self.store.error, self.store.answers = None, {}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.works.set()
    world.service.close(BOUND_S)
    assert not world.service._thread.is_alive()


class TestAnswers:
    def test_all_that_was_asked_for(self, world):
        for _ in range(2):
            lookup, found = world.ask()
            assert (found, lookup.missed, lookup.failed) == (6, None, False)
        counters = world.service.counters
        assert (counters.asked, counters.answered, counters.keys) == (2, 2, 24)

    @pytest.mark.parametrize("miss", range(6))
    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_blocks_before_the_first_that_some_rank_has_not(self, world, miss, rank):
        """Later chunks are not asked for."""
        world.store.answers = {(HASHES[miss], rank): 0, (HASHES[5], 0): 0}
        lookup, found = world.ask()
        assert (found, lookup.missed, lookup.failed) == (miss, HASHES[miss], False)
        assert world.store.chunks() == [HASHES[i : i + 2] for i in range(0, miss + 1, 2)]

    def test_of_an_odd_number_end_with_a_smaller_chunk(self, world):
        assert world.ask(HASHES[:3])[1] == 3
        assert world.store.chunks() == [HASHES[:2], HASHES[2:3]]

    def test_of_nothing_is_nothing(self, world):
        assert world.ask([])[1] == 0
        assert world.store.asked == []

    def test_are_about_every_ranks_key_of_the_asked_epoch(self, world):
        world.ask(HASHES[:1], "e1")
        names = [KEYS.object_key(shard=rank, group=0, block_hash=HASHES[0], epoch="e1") for rank in (0, 1)]
        assert world.store.asked == [names]


class TestFailures:
    def test_an_answer_that_is_a_code_ends_the_run_but_does_not_say_that_the_block_is_missing(self, world):
        world.store.answers = {(HASHES[3], 1): -900}
        lookup, found = world.ask()
        assert (found, lookup.missed, lookup.failed) == (3, None, True)
        assert (world.service.counters.failed, world.service.counters.answered) == (1, 0)
        assert len(world.store.asked) == 2

    def test_an_exception_of_the_client_is_a_logged_miss_and_the_next_lookup_works(self, world, caplog):
        world.fail("exception")
        assert "RuntimeError: broke" in caplog.text
        assert world.service.counters.failed == 1
        assert world.ask()[1] == 6

    @pytest.mark.parametrize("how", ["exception", "code", "timeout"])
    def test_in_a_row_open_the_breaker_and_lookups_are_misses_at_once_until_a_probe_works(self, world, how):
        counters = world.service.counters
        for _ in range(2):
            world.fail(how)
        assert counters.refused == 0
        assert (counters.failed, counters.timed_out) == ((0, 2) if how == "timeout" else (2, 0))
        for later in (0.0, OPEN_S - 0.1):
            world.now += later
            assert world.service.result(world.service.ask(HASHES, ""), 0.0) == 0
        assert counters.refused == 2
        assert len(world.store.asked) <= 2

        world.store.works.set()
        world.now += 0.1

        assert [world.ask()[1] for _ in range(3)] == [6, 6, 6]
        assert counters.refused == 2

    def test_with_a_success_between_them_leave_the_breaker_closed(self, world):
        for _ in range(3):
            world.fail("exception")
            assert world.ask()[1] == 6


class TestBounds:
    def test_a_result_is_waited_for_no_longer_than_asked(self, world):
        world.store.works.clear()
        lookup = world.service.ask(HASHES, "")
        begun = time.monotonic()
        assert [world.service.result(lookup, wait_s) for wait_s in (0.0, 0.05)] == [None, None]
        assert 0.05 <= time.monotonic() - begun < BOUND_S / 2
        world.store.works.set()
        assert world.service.result(lookup, BOUND_S) == 6

    def test_at_its_deadline_a_lookup_is_a_miss_for_good_and_counted_once(self, world):
        world.store.works.clear()
        late = world.service.ask(HASHES, "")
        assert world.store.entered.wait(BOUND_S)
        world.now += TIMEOUT_S - 0.1
        assert world.service.result(late, 0.0) is None
        world.now += 0.1
        assert world.service.result(late, 0.0) == 0
        world.store.works.set()
        world.service.close(BOUND_S)  # the store's answer has come by now
        assert world.service.counters.answered == 0, "nobody waited for it"
        assert world.service.result(late, 0.0) == 0
        assert world.service.counters.timed_out == 1

    def test_lookups_that_nobody_waits_for_any_more_are_not_asked(self, world):
        world.store.works.clear()
        first, asked_for, expired = (world.service.ask([h], "") for h in HASHES[:3])
        assert world.store.entered.wait(BOUND_S)
        world.now += TIMEOUT_S
        assert [world.service.result(lookup, 0.0) for lookup in (first, asked_for)] == [0, 0]
        world.store.works.set()
        world.service.close(BOUND_S)
        assert world.store.chunks() == [HASHES[:1]]
        assert world.service.result(expired, 0.0) == 0

    def test_closing_waits_for_a_hung_store_no_longer_than_asked(self, world):
        world.store.works.clear()
        world.service.ask(HASHES, "")
        assert world.store.entered.wait(BOUND_S)
        begun = time.monotonic()
        world.service.close(0.05)
        assert time.monotonic() - begun < BOUND_S / 2
        assert world.store.closed_in == pytest.approx(0.1)
        assert world.service._thread.daemon, "it must not keep the process from ending"
