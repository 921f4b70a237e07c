"""The compute fence: it is waited for, and a device that hangs does not keep the thread."""

import pytest

from kvledger.worker.fence import Fence, FenceTimeoutError


class Event:
    """A device event as `torch.cuda.Event` shows it: `query` says whether the device has passed it."""

    def __init__(self, passed_after: int | None) -> None:
        self.asked = 0
        self._passed_after = passed_after

    def query(self) -> bool:
        self.asked += 1
        return self._passed_after is not None and self.asked > self._passed_after


def test_that_the_device_never_passes_is_an_error_in_time():
    with pytest.raises(FenceTimeoutError, match=r"0\.05 s .*transfer_timeout_s"):
        Fence(Event(passed_after=None)).wait(0.05)


def test_is_waited_for_until_the_device_has_passed_it():
    event = Event(passed_after=5)
    Fence(event).wait(30)
    assert event.asked == 6


def test_without_an_event_there_is_nothing_to_wait_for():
    Fence(None).wait(0.0)
