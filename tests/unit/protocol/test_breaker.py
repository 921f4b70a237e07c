"""The timed breaker: when it opens, for how long it holds work back, what probes and successes change."""

from kvledger.protocol import Breaker


def make_breaker(threshold: int = 1) -> Breaker:
    return Breaker(threshold=threshold, initial_s=1.0, max_s=5.0)


def test_opens_with_as_many_failures_in_a_row_as_the_threshold_says():
    breaker = make_breaker(threshold=3)
    for now in (0.0, 1.0):
        breaker.failure(now)
        assert breaker.allow(now)

    breaker.failure(2.0)

    assert not breaker.allow(2.0)


def test_a_success_starts_the_count_of_failures_again():
    breaker = make_breaker(threshold=3)
    breaker.failure(0.0)
    breaker.failure(0.0)
    breaker.success()
    breaker.failure(1.0)
    breaker.failure(1.0)
    assert breaker.allow(1.0)

    breaker.failure(1.0)

    assert not breaker.allow(1.0)


def test_one_probe_is_allowed_after_each_delay():
    breaker = make_breaker()
    breaker.failure(10.0)

    assert not breaker.allow(10.9)
    assert breaker.allow(11.0)
    assert not breaker.allow(11.0)
    assert not breaker.allow(11.9)
    assert breaker.allow(12.0)


def test_the_delay_doubles_with_each_failed_probe_up_to_its_bound():
    breaker = make_breaker()
    now = 0.0
    for delay in (1.0, 2.0, 4.0, 5.0, 5.0):
        breaker.failure(now)
        assert not breaker.allow(now + delay - 0.1)
        now += delay
        assert breaker.allow(now)


def test_a_success_closes_at_once_and_forgets_the_long_delay():
    breaker = make_breaker()
    breaker.failure(0.0)
    breaker.failure(1.0)
    breaker.success()
    assert breaker.allow(1.0)
    assert breaker.allow(1.0)

    breaker.failure(10.0)

    assert not breaker.allow(10.9)
    assert breaker.allow(11.0)


def test_says_what_has_become_of_it():
    """Adapters log from these answers; here nothing is logged."""
    breaker = make_breaker(threshold=2)
    assert not breaker.success()
    assert breaker.failure(0.0) == 0.0
    told = [(breaker.is_open, breaker.failure(now)) for now in (0.0, 1.0)]
    assert told == [(False, 1.0), (True, 2.0)]
    assert breaker.success()
    assert not breaker.is_open
