"""The compute fence: a store job reads its blocks only after the forward that fills them.

On CUDA an event recorded on the compute stream when the job is handed over (never the transfer thread's own stream,
which orders nothing). On CPU the forward has returned when vLLM hands the job over.
"""

from typing import Any

import torch


class Fence:
    """Something the transfer thread waits for before it touches blocks."""

    def __init__(self, event: Any | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Return when everything enqueued before the fence was recorded has run."""
        if self._event is not None:
            self._event.synchronize()


def record_fence(device: torch.device) -> Fence:
    """A fence behind what the calling thread's current stream holds."""
    if device.type != "cuda":
        return Fence(None)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)
