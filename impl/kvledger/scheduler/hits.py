"""Which hit a request is offered: lookups per request, how long the scheduler waits for them, when there is none to offer.

Spec: `ExternalHit` is what `match` answers; `Relearned` is what a missed hash changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.config import Settings
from kvledger.groups import GroupPlan
from kvledger.protocol import Ledger
from kvledger.scheduler.lookup import Lookup, LookupService
from kvledger.scheduler.names import BlockNames

if TYPE_CHECKING:
    from vllm.v1.request import Request

ANSWER_VALID_S = 5.0
"""How long a lookup's answer may wait for admission; the store's key lease (10 s by default) is longer."""


@dataclass(slots=True)
class Asked:
    """A lookup of one request, valid for exactly these circumstances."""

    request: "Request"
    preemptions: int
    first: int
    lookup: Lookup
    asked_at: float
    noted: bool = False
    """Whether the ledger has been told what the answer did not find (once: it may be stored meanwhile)."""

    def fits(self, request: "Request", first: int, epoch: str, now: float) -> bool:
        """Whether the answer is (or will be) an answer to this question."""
        return (
            self.request is request
            and self.preemptions == request.num_preemptions
            and self.first == first
            and self.lookup.epoch == epoch
            and now - self.asked_at < ANSWER_VALID_S
        )


class Hits:
    """Lookups of requests that wait to be admitted. `lookups` None: this engine offers no hits."""

    def __init__(
        self,
        *,
        settings: Settings,
        plan: GroupPlan,
        names: BlockNames,
        ledger: Ledger,
        lookups: LookupService | None,
        clock: Callable[[], float],
        forget: Callable[[list[bytes]], None],
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._names = names
        self._ledger = ledger
        self._lookups = lookups
        self._clock = clock
        self._forget = forget
        self._asked: dict[str, Asked] = {}
        self.new_step()

    def new_step(self) -> None:
        """A step begins: the scheduler thread may wait for lookups again, for `lookup_wait_s` in all."""
        settings = self._settings
        self._wait_allowance_s = settings.lookup_wait_s if settings.lookup_async else settings.lookup_timeout_s

    def match(self, request: "Request", num_computed_tokens: int, accepted: int) -> tuple[int | None, bool]:
        """`ExternalHit`: tokens that the store can add to `num_computed_tokens` (block aligned), and whether they load
        asynchronously.

        (None, False) while unknown, for a bounded time. At least one token is always left to compute. `accepted` loads
        have been accepted in this step and are not emitted yet.
        """
        first = num_computed_tokens // self._plan.block_size
        last = self._last_block(request)
        if self._lookups is None or last <= first or not self._may_load(request, accepted):
            return 0, False
        names = self._names.of(request)
        if names is None:
            return 0, False
        asked = self._ask(request, names, first, last, self._lookups)
        found = self._await(asked.lookup, self._lookups)
        if found is None:
            return None, False
        if asked.lookup.missed is not None and not asked.noted:
            self._forget([asked.lookup.missed])
        asked.noted = True
        tokens = found * self._plan.block_size
        if tokens == 0 or tokens < self._settings.min_load_tokens:
            return 0, False
        return tokens, self._settings.load_async

    def _last_block(self, request: "Request") -> int:
        complete: int = (request.num_tokens - 1) // self._plan.block_size
        return min(complete, len(request.block_hashes) // self._plan.hashes_per_block)

    def _may_load(self, request: "Request", accepted: int) -> bool:
        if not self._ledger.may_hit(request.request_id) or request.skip_reading_prefix_cache:
            return False
        limit = self._settings.max_loads_in_flight
        return limit is None or self._ledger.loads_in_flight() + accepted < limit

    def _ask(self, request: "Request", names: Sequence[bytes], first: int, last: int, lookups: LookupService) -> Asked:
        now = self._clock()
        asked = self._asked.get(request.request_id)
        if asked is None or not asked.fits(request, first, self._ledger.epoch, now):
            lookup = lookups.ask([bytes(n) for n in names[first:last]], self._ledger.epoch)
            asked = Asked(request, request.num_preemptions, first, lookup, now)
            self._asked[request.request_id] = asked
        return asked

    def _await(self, lookup: Lookup, lookups: LookupService) -> int | None:
        """The answer; waits no longer than what is left of this step's allowance."""
        before = self._clock()
        found = lookups.result(lookup, self._wait_allowance_s)
        self._wait_allowance_s = max(0.0, self._wait_allowance_s - (self._clock() - before))
        return found

    def take(self, request_id: str) -> Asked | None:
        """The request is admitted, or over: what it had asked."""
        return self._asked.pop(request_id, None)

    def waiting(self) -> frozenset[str]:
        """Requests with a lookup of their own."""
        return frozenset(self._asked)

    def clear(self) -> None:
        """Cache reset: no answer of before counts."""
        self._asked.clear()
