"""Which admission of which request object is the current one: generations at vLLM's interface.

vLLM counts preemptions on the request object, also those of `reset_prefix_cache(reset_running_requests=True)`, and
lists the id as preempted only after it may have re-admitted the request in the same schedule (contract G7). Object
identity plus that count tells generations apart without a set of our own that could drift.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Admission:
    """One admission: the request object and how often it had been preempted then."""

    request: "Request"
    preemptions: int


class Admissions:
    """Current admission per request id."""

    def __init__(self) -> None:
        self._current: dict[str, Admission] = {}

    def is_current(self, request: "Request") -> bool:
        """Whether this very admission of the request is already known."""
        known = self._current.get(request.request_id)
        return known is not None and known.request is request and known.preemptions == request.num_preemptions

    def begin(self, request: "Request") -> None:
        """The request is admitted anew."""
        self._current[request.request_id] = Admission(request, request.num_preemptions)

    def request(self, request_id: str) -> "Request | None":
        """The admitted request object, if any."""
        known = self._current.get(request_id)
        return None if known is None else known.request

    def end_if_preempted(self, request_id: str) -> bool:
        """`EndGeneration` for a preempted id: end the admission unless it is younger than the preemption that vLLM lists."""
        known = self._current.get(request_id)
        if known is None or known.preemptions >= known.request.num_preemptions:
            return False
        del self._current[request_id]
        return True

    def end(self, request: "Request") -> bool:
        """End the admission of this very request object."""
        known = self._current.get(request.request_id)
        if known is None or known.request is not request:
            return False
        del self._current[request.request_id]
        return True

    def keep_only(self, request_ids: set[str]) -> None:
        """End all others (cache reset)."""
        self._current = {r: a for r, a in self._current.items() if r in request_ids}

    def __len__(self) -> int:
        return len(self._current)
