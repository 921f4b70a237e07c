"""The pin table: references per block, the budget of distinct blocks, its figures."""

from kvledger.protocol import PinSnapshot, PinTable


def test_a_block_stays_pinned_until_the_last_job_that_pinned_it():
    pins = PinTable(10)
    pins.pin(1, (5, 6))
    pins.pin(2, (6, 7))
    assert dict(pins.blocks()) == {5: 1, 6: 2, 7: 1}
    assert (pins.held(1), pins.held(2), pins.held(3)) == ((5, 6), (6, 7), ())

    assert pins.unpin(1) == (6, 5)

    assert dict(pins.blocks()) == {6: 1, 7: 1}
    assert pins.unpin(2) == (7, 6)
    assert dict(pins.blocks()) == {}


def test_the_budget_counts_distinct_blocks_and_may_be_used_up():
    pins = PinTable(3)
    pins.pin(1, (5, 6))
    pins.pin(2, (6, 7))

    assert pins.is_full
    assert not pins.fits(0, 8)
    assert pins.fits(0, 6)
    pins.unpin(2)
    assert not pins.is_full


def test_blocks_about_to_be_pinned_count():
    pins = PinTable(3)
    pins.pin(1, (5,))

    assert pins.fits(1, 7)
    assert not pins.fits(2, 7)


def test_figures_show_now_and_the_most_there_ever_was():
    pins = PinTable(10)
    assert pins.snapshot() == PinSnapshot(blocks=0, blocks_max=0, max_blocks=10, jobs=0)
    pins.pin(1, (5, 6))
    pins.pin(2, (6, 7))
    assert pins.snapshot() == PinSnapshot(blocks=3, blocks_max=3, max_blocks=10, jobs=2)
    pins.unpin(1)
    pins.unpin(2)
    pins.pin(3, (5,))
    assert pins.snapshot() == PinSnapshot(blocks=1, blocks_max=3, max_blocks=10, jobs=1)
