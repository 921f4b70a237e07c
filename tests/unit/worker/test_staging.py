"""Staging memory: what transfers that never end take out of use, and what they leave to the next ones."""

import random

import pytest

from kvledger.config import Settings
from kvledger.errors import ConfigError
from kvledger.protocol import Breaker, Kind
from kvledger.worker.staging import Slot, StagingArea

MIB = 1 << 20
QUARANTINE_S = 120.0


def make_area(rows: int = 8, *, batch: int = 4, quarantine_s: float = QUARANTINE_S) -> StagingArea:
    return StagingArea(
        total_bytes=rows * 64, batch_bytes=batch * 64, object_bytes=64, pin_memory=False, quarantine_s=quarantine_s
    )


def default_area(object_bytes: int) -> StagingArea:
    """What a lane has with default settings."""
    settings = Settings()
    return StagingArea(
        total_bytes=settings.staging_bytes // len(Kind),
        batch_bytes=settings.max_batch_bytes,
        object_bytes=object_bytes,
        pin_memory=False,
        quarantine_s=settings.quarantine_s,
    )


def take(area: StagingArea, count: int, now: float = 0.0) -> Slot:
    """Rows for a transfer; the test fails if there are none."""
    slot = area.take(count, now)
    if slot is None:
        pytest.fail(f"expected room for {count}")
    return slot


def lose_a_batch(area: StagingArea, now: float) -> int:
    """A transfer of as many objects as may be sent at once does not end; their number (0: none was possible)."""
    if count := min(area.batch_objects, area.room(now)):
        area.quarantine(take(area, count, now), now)
    return count


@pytest.mark.parametrize("object_bytes", [4096, MIB, 5 * MIB, 16 * MIB, 32 * MIB])
class TestDefaultSettings:
    def test_batches_are_full_while_all_goes_well(self, object_bytes):
        area = default_area(object_bytes)
        for _ in range(3):
            assert area.room(0.0) >= area.batch_objects == 64 * MIB // object_bytes
            area.give_back(take(area, area.batch_objects))

    def test_after_two_transfers_that_never_ended_there_is_room(self, object_bytes):
        area = default_area(object_bytes)
        assert all(lose_a_batch(area, 0.0) for _ in range(2))
        assert area.take(1, 0.0) is not None


@pytest.mark.parametrize("object_bytes", [4096, MIB])
def test_store_whose_transfers_never_end_does_not_use_up_a_lane(object_bytes):
    """The breaker of a rank lets so few of them start within the quarantine that the rows last."""
    settings = Settings()
    area = default_area(object_bytes)
    breaker = Breaker(threshold=settings.breaker_failures, initial_s=settings.breaker_open_s, max_s=60.0)
    lost = 0
    for now in map(float, range(1000)):
        while breaker.allow(now):
            assert lose_a_batch(area, now), f"no room after {lost} at {now:g} s"
            lost += 1
            breaker.failure(now)
    assert lost > 10


class TestRows:
    def test_of_a_late_transfer_are_used_by_nobody_before_the_bound(self):
        area = make_area(quarantine_s=5.0)
        late = take(area, 4)
        area.quarantine(late, 1.0)
        for now in (1.0, 5.9):
            slot = take(area, 2, now)
            assert slot.first >= 4
            assert area.take(3, now) is None
            area.give_back(slot)
        assert area.room(5.9) == 2
        assert area.room(6.0) == 4
        assert take(area, 4, 6.0).address == late.address

    def test_only_those_that_a_transfer_used_are_held_back(self):
        area = make_area(rows=9)
        area.quarantine(take(area, 1), 0.0)
        assert area.room(0.0) == 4

    def test_last_one_can_be_taken_and_then_there_is_none(self):
        area = make_area(rows=2)
        for _ in range(2):
            assert area.room(0.0) == 1
            area.quarantine(take(area, 1), 0.0)
        assert area.room(0.0) == 0
        assert area.take(1, 0.0) is None
        assert area.room(QUARANTINE_S) == 1

    def test_lie_one_after_the_other_in_registered_memory(self):
        area = make_area()
        registered = []
        area.register(lambda address, size: registered.append((address, size)))
        area.quarantine(take(area, 3), 0.0)
        slot = take(area, 2)
        slot.rows[1] = 7
        assert slot.rows.shape == (2, 64)
        assert registered == [(area.buffer.data_ptr(), 8 * 64)]
        assert [slot.pointer(i) - registered[0][0] for i in range(2)] == [3 * 64, 4 * 64]
        assert area.buffer[4 * 64 : 5 * 64].eq(7).all()


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_ever_in_two_transfers(seed):
    rng, area = random.Random(seed), make_area(rows=32, batch=16, quarantine_s=6.0)
    busy: dict[int, float] = {}  # row -> until when it is not free
    now, taken = 0.0, 0
    for _ in range(400):
        now += rng.random()
        slot = area.take(rng.randint(1, 16), now)
        if slot is None:
            continue
        taken += 1
        rows = range(slot.first, slot.first + len(slot.rows))
        assert rows.stop <= 32
        assert all(busy.get(row, 0.0) <= now for row in rows)
        if rng.random() < 0.4:
            area.quarantine(slot, now)
            busy |= dict.fromkeys(rows, now + 6.0)
        else:
            area.give_back(slot)
    assert taken > 100


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (4, 1), (1, 4)])
def test_one_object_must_fit(rows, batch):
    assert make_area(rows, batch=batch).room(0.0) >= 1
    for total, most in ((rows * 64, 63), (63, batch * 64)):
        with pytest.raises(ConfigError) as error:
            StagingArea(total_bytes=total, batch_bytes=most, object_bytes=64, pin_memory=False, quarantine_s=1.0)
        assert (error.value.field, error.value.value) == ("max_batch_bytes", most)
