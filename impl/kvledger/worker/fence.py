"""The compute fence: a store job reads its blocks only after the forward that fills them.

On CUDA an event recorded on the compute stream when the job is handed over (never the transfer thread's own stream,
which orders nothing). On CPU the forward has returned when vLLM hands the job over.
"""

import time
from typing import Any

import torch

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3


class FenceTimeoutError(RuntimeError):
    """The GPU has not got as far as the fence in time; nothing was read or written behind it."""


class Fence:
    """Something the transfer thread waits for before it touches blocks."""

    def __init__(self, event: Any | None) -> None:
        self._event = event

    def wait(self, timeout_s: float) -> None:
        """`RankForward` has happened: return when everything enqueued before the fence was recorded has run.

        Asks again and again instead of `synchronize`, which has no bound: a device that hangs must not keep the thread.

        Raises:
            FenceTimeoutError: not so within `timeout_s`.
        """
        if self._event is None:
            return
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while not self._event.query():
            if time.monotonic() >= deadline:
                raise FenceTimeoutError(
                    f"the device has not finished the step in {timeout_s} s (transfer_timeout_s); is it hung?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def record_fence(device: torch.device) -> Fence:
    """A fence behind what the calling thread's current stream holds."""
    if device.type != "cuda":
        return Fence(None)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)
