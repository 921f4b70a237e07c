"""An engine without a model: vLLM's real scheduler, block pool and aggregator around any connector.

Only the forward is replaced, by the arithmetic of `oracle`. Everything that a connector can see is vLLM's own: hook
order, scheduler outputs, block references, the aggregation over ranks. On the stand-in, transfers move only between
steps or where a step says so, so a run is a function of its script although the connector's threads are real. On a real
store they move when they like: nobody joins the engine's `world` then, and `rest` waits for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.request import Request, RequestStatus

from kvledger_conformance.engine import compat, oracle
from kvledger_conformance.engine.forward import Flight, Forward, works_of
from kvledger_conformance.engine.memory import Rank
from kvledger_conformance.engine.watch import settle
from kvledger_conformance.store.transfer import Transfer
from kvledger_conformance.store.world import World
from kvledger_conformance.suite.properties import Violation, require


class ForwardFailedError(RuntimeError):
    """The forward raised, as an out-of-memory error would; vLLM still runs the collecting hooks."""


class VirtualClock:
    """Seconds that pass one per step. Connectors that take a clock get this one; the others live in real time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class LoadWatch:
    """One asynchronous load of one request: which ranks have yet to report it."""

    waiting: set[int]
    request: Request


@dataclass
class Engine:
    """See the module's docstring. Built by `build_engine`."""

    shape: compat.Shape
    world: World
    clock: VirtualClock
    scheduler: Any
    ranks: list[Rank]
    aggregator: KVOutputAggregator
    hasher: Callable[[Request], list[Any]]
    note: Callable[[str], None] = lambda _text: None
    """Hears what happens, in words."""
    requests: dict[str, Request] = field(default_factory=dict)
    ended: list[tuple[str, Request]] = field(default_factory=list)
    names: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    loads: dict[str, LoadWatch] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    incarnation: dict[int, int] = field(default_factory=dict)
    found: list[Violation] = field(default_factory=list)
    accepted: list[Request] = field(default_factory=list)
    past: frozenset[str] = frozenset()
    rest: Callable[[], None] = settle
    """Wait until no thread of the connector has anything left to do."""
    refine: Callable[["Engine"], None] | None = None
    reset_seen: bool = False
    borrowed: bool = False
    """While the harness itself holds blocks."""
    starve: int = 0
    preemptions: int = 0
    weights: int = 0
    steps: int = 0
    weights_of: dict[int, int] = field(default_factory=dict)
    core: Any = None
    """vLLM's loop, if two steps may be in flight."""
    flights: list[Flight] = field(default_factory=list)
    """Steps whose results core has not seen, oldest first."""
    guesses: dict[int, dict[int, int]] = field(default_factory=dict)
    """Sampled tokens by request object and position, known to the ranks before core hears of them."""
    writes_to_free: bool = False
    """Whether a forward wrote into a block that was free by then: only with two steps in flight."""
    aborting: list[str] = field(default_factory=list)
    """Aborts that arrive while the next step runs."""
    pace: str = "late"
    lag: str = "gpu"
    observe: Callable[[str], None] = lambda _point: None
    """Called at each point of a step where kvledger's state is compared with the model's."""

    def __post_init__(self) -> None:
        self.world.on_begin = self._transfer_begins
        self.world.on_commit = self._object_stored
        self.world.on_read = self._blocks_read
        self._watch_pool()
        self._watch_allocation()
        self._watch_admission()

    @property
    def connector(self) -> Any:
        """The scheduler-side connector."""
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def tables(self) -> dict[str, list[int]]:
        """Block table of every request that has one."""
        manager = self.scheduler.kv_cache_manager
        return {r: list(manager.get_block_ids(r)[0]) for r in list(self.scheduler.requests)}

    # -- watching vLLM -----------------------------------------------------

    def _watch_pool(self) -> None:
        """Count how often a block is given out: whoever holds an old count does not own the block any more."""
        take = self.pool.get_new_blocks

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            for block in blocks:
                self.incarnation[block.block_id] = self.incarnation.get(block.block_id, 0) + 1
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    def _watch_allocation(self) -> None:
        """Let a test say "no block is free now" to running requests, which makes vLLM preempt by its own rules.

        That lasts until a preemption, or `starve` steps: a connector may ask core to wait for blocks instead.
        """
        manager = self.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            if self.starve and not self._preempted_now() and request.status is RequestStatus.RUNNING:
                return None
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = allocate_slots

    def preemptions_now(self) -> int:
        """How often the requests that core knows have been preempted."""
        return sum(r.num_preemptions for r in self.scheduler.requests.values())

    def _preempted_now(self) -> bool:
        return self.preemptions_now() > self.preemptions

    def _watch_admission(self) -> None:
        """Note whose external hit core accepts: that is when a load begins."""
        tell = self.connector.update_state_after_alloc

        def update_state_after_alloc(request: Request, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens > 0:
                self.accepted.append(request)
            tell(request, blocks, num_external_tokens)

        self.connector.update_state_after_alloc = update_state_after_alloc

    def breach(self, name: str, what: str) -> None:
        """A property is broken: raise, unless this run looks past that property for what lies behind it."""
        if name not in self.past:
            raise Violation(name, what)

    # -- watching transfers (called from the connector's threads) ----------

    def _report(self, name: str, what: str) -> None:
        """As `breach`, but raised by the next `check`: not in the connector's thread."""
        if name not in self.past:
            self.found.append(Violation(name, what))

    def _transfer_begins(self, transfer: Transfer) -> None:
        index = self.rank_of(transfer.client)
        if index is None or index >= len(self.ranks):
            return
        blocks = self.ranks[index].blocks_at(transfer.segments)
        transfer.notes["blocks"] = {b: self.incarnation.get(b, 0) for b in blocks}
        transfer.notes["weights"] = self.weights
        for b in blocks:
            if self.pool.blocks[b].ref_cnt == 0:
                self._report("blocks-held-during-dma", f"{transfer} begins on block {b}, which is free")

    def _blocks_read(self, transfer: Transfer) -> None:
        transfer.notes["read"] = True

    def rank_of(self, client: str) -> int | None:
        """Rank whose handle this is, if it is a rank's."""
        return int(client[4:]) if client.startswith("rank") and client[4:].isdigit() else None

    def _object_stored(self, transfer: Transfer, key: str, data: bytes) -> None:
        rank = self.rank_of(transfer.client)
        if rank is None:
            return
        name = next((h for h in tuple(self.names) if h.hex() in key), None)
        size = self.shape.block_size
        got = _images(data, size)
        if name is None:
            wrong = any(c in (-7, 0) for image in got for c in image)
            right: list[tuple[int, ...]] | None = None
        else:
            right = oracle.block_images(self.names[name], size, rank, transfer.notes.get("weights", self.weights))
            wrong = sorted(got) != sorted(right)
        if wrong:
            tokens = "unknown tokens" if name is None else f"tokens {list(self.names[name])[-size:]}"
            self._report("stored-bytes-right", f"{transfer.client} stored other bytes under the key of {tokens}")

    # -- a step ------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether vLLM's loop would step."""
        return bool(self.scheduler.has_requests() or self.flights)

    def step(self, *, pace: str = "late", lag: str = "gpu", fail_forward: bool = False) -> Any:
        """One turn of vLLM's loop; the step that it scheduled, if any.

        `pace`: what hooks submit to the store runs after the turn ("late"), before hooks collect ("early"), or as soon
        as it can, even before the forward ("rush"). `lag`, with two steps in flight: forwards run when core waits for
        their result ("gpu") or at once ("none"); hooks, too, run only then, on all ranks ("worker") or one ("rank0").
        """
        self.steps += 1
        self.clock.now += 1.0
        self.preemptions = self.preemptions_now()
        self.pace, self.lag = pace, lag
        before = self.flights[-1:]
        if self.core is None:
            self._turn(fail_forward)
        else:
            self._turn_of_two(fail_forward)
        self.note_prefixes()
        self.check()
        self.world.pause(False)
        self.rest()
        self.check()
        self.observe("settle")
        return self.last_output if self.flights[-1:] != before or self.core is None else None

    def _turn(self, fail_forward: bool) -> None:
        """As `EngineCore.step`."""
        output = self.scheduler.schedule()
        flight = self._launch(output, fail_forward)
        result = self._land(flight)
        self._drain_aborts()
        self.scheduler.update_from_output(output, result)
        self.observe("update")

    def _turn_of_two(self, fail_forward: bool) -> None:
        """vLLM's own `step_with_batch_queue`."""
        self.core.fail_forward = fail_forward
        for name in self.aborting:
            self.core.aborts_queue.put([name])
        self.aborting.clear()
        self.core.step_with_batch_queue()
        self.core._process_aborts_queue()  # noqa: SLF001 - what came too late for this step, the loop does between steps

    def _drain_aborts(self) -> None:
        names, self.aborting = self.aborting, []
        if names:
            self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def launch(self, output: Any) -> Callable[[], Any]:
        """The executor of `AsyncCore`: a step is sent to the ranks; what waits for its result."""
        flight = self._launch(output, self.core.fail_forward)
        return lambda: self._land(flight)

    def _launch(self, output: Any, fail_forward: bool) -> Flight:
        self.last_output = output
        self.starve = 0 if output.preempted_req_ids else max(0, self.starve - 1)
        self._after_schedule(output)
        self.check()
        self.observe("schedule")
        lagging = self.lag.startswith(("worker", "rank")) and self.core is not None
        metadata = compat.metadata_for(output, 2 if lagging else len(self.ranks))
        flight = Flight(output, metadata, works_of(output, self.scheduler.requests, self.tables()), fail_forward)
        self.flights.append(flight)
        self.world.pause(self.pace != "rush")
        for rank in self.ranks:
            if not lagging or self.lag not in ("worker", f"rank{rank.index}"):
                self._tell(rank, flight)
        if self.lag == "none":
            self._compute(flight)
        return flight

    def _land(self, flight: Flight) -> Any:
        """Core waits for the result of a step."""
        self._compute(flight)
        results = [flight.result(rank) for rank in self.ranks]
        result = results[0] if len(results) == 1 else self.aggregator.aggregate(results)
        self._after_ranks(flight, result)
        self.flights.remove(flight)
        return result

    def catch_up(self) -> None:
        """Hooks and forwards of all steps in flight run now."""
        for flight in self.flights:
            self._compute(flight)
        self.world.pause(False)

    def _compute(self, flight: Flight) -> None:
        for rank in self.ranks:
            self._tell(rank, flight)
        for rank in self.ranks:
            rank.stream.run_to(flight.marks[rank.index])

    def _after_schedule(self, output: Any) -> None:
        preempted = output.preempted_req_ids or ()
        parts = [f"{r} +{n}" for r, n in output.num_scheduled_tokens.items()]
        parts += [f"{r} preempted" for r in preempted]
        accepted, self.accepted = self.accepted, []
        for request in accepted:
            self.attempts[id(request)] = self.attempts.get(id(request), 0) + 1
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.loads[request.request_id] = LoadWatch({r.index for r in self.ranks}, request)
            parts.append(f"{request.request_id} loads into {self.tables()[request.request_id]}")
        self.note("schedule: " + (", ".join(parts) or "nothing"))

    def _tell(self, rank: Rank, flight: Flight) -> None:
        """The hooks of this step, and of steps before it, run on a rank, if they have not."""
        for earlier in self.flights[: self.flights.index(flight) + 1]:
            if rank.index not in earlier.told:
                earlier.told.add(rank.index)
                self._run_hooks(rank, earlier)

    def _run_hooks(self, rank: Rank, flight: Flight) -> None:
        # A synchronous load is waited for inside its hook, so nothing may be paused then, and no forward held back.
        waits = getattr(flight.output, "has_sync_kv_loads", False)
        paused = self.pace != "rush" and not waits
        self.world.pause(paused)
        if waits:
            rank.stream.run_to(rank.stream.launched)

        def forward() -> None:
            if self.pace == "rush":
                self.rest()
            if flight.fail_forward:
                raise ForwardFailedError("scripted")
            flight.marks[rank.index] = rank.stream.launch(lambda: self._run_forward(rank, flight))
            if self.core is None:
                rank.stream.run_to(flight.marks[rank.index])

        def before_collect() -> None:
            if self.pace == "early":
                self.world.pause(False)
            self.rest()
            self.world.pause(paused)

        with compat.as_rank(rank.index, len(self.ranks)), compat.cpu_worker(rank.stream):
            transfers = compat.run_hooks(rank.connector, flight.output, flight.metadata, forward, before_collect)
        flight.transfers[rank.index] = transfers
        self._note_load_reports(rank, transfers)
        self.observe(f"hooks{rank.index}")

    def _run_forward(self, rank: Rank, flight: Flight) -> None:
        if rank is not self.ranks[0]:  # tensor parallel: no rank has a token before all have
            self._tell(self.ranks[0], flight)
            self.ranks[0].stream.run_to(flight.marks[0])
        tables = [b for work in flight.works for b in work.table[work.start // self.shape.block_size :]]
        self.writes_to_free = self.writes_to_free or any(not self.pool.blocks[b].ref_cnt for b in tables)
        Forward(self, rank).run(flight)

    def _note_load_reports(self, rank: Rank, transfers: Any) -> None:
        for request_id in transfers.finished_recving or ():
            watch = self.loads.get(request_id)
            if watch is None or rank.index not in watch.waiting:
                what = f"rank {rank.index} reports a load of {request_id} unasked"
                self.breach("one-completion-per-load", what)
                continue
            watch.waiting.discard(rank.index)
            self.note(f"rank {rank.index}: load of {request_id} reported")
        if transfers.invalid_block_ids:
            self.note(f"rank {rank.index}: blocks {sorted(transfers.invalid_block_ids)} reported bad")

    def _after_ranks(self, flight: Flight, result: Any) -> None:
        """What read wrong KV is a breach, unless core throws it away: a synchronous load that failed is told in the same
        step, and nobody waits for what a request that has ended, or was reset, computes."""
        transfers = result.kv_connector_output
        invalid = set(transfers.invalid_block_ids or ()) if transfers is not None else set()
        told = invalid if getattr(flight.output, "has_sync_kv_loads", False) else set()
        for suspect in flight.suspects:
            if not suspect.blocks & told and self._is_delivered(suspect.request):
                self.breach(*suspect.breach)
        for request_id in (transfers.finished_recving or ()) if transfers is not None else ():
            self.loads.pop(request_id, None)

    def _is_delivered(self, request: Request) -> bool:
        """Whether core uses what the oldest step in flight computes for the request."""
        known = self.scheduler.requests.get(request.request_id)
        if known is not request or request.is_finished() or request.request_id in self.aborting:
            return False
        return not (getattr(request, "num_stale_output_tokens", 0) and request.drop_stale_output)

    # -- checks ------------------------------------------------------------

    def check(self) -> None:
        """What must hold at any moment."""
        if self.found:
            raise self.found[0]
        for transfer in self.world.moving():
            self._check_transfer(transfer)
        owners: dict[int, int] = {}
        for table in self.tables().values():
            for block in table:
                owners[block] = owners.get(block, 0) + 1
        for block in self.pool.blocks:
            if not block.is_null and block.ref_cnt < owners.get(block.block_id, 0):
                what = f"block {block.block_id} has {block.ref_cnt} references and {owners[block.block_id]} owners"
                self.breach("references-exact", what)
        if self.refine is not None and not self.borrowed:
            self.refine(self)
        if self.world.closed_calls:
            self.breach("no-call-after-close", ", ".join(self.world.closed_calls))

    def _check_transfer(self, transfer: Transfer) -> None:
        for block, incarnation in transfer.notes.get("blocks", {}).items():
            name = "blocks-held-during-dma"
            if self.incarnation.get(block, 0) != incarnation:
                self.breach(name, f"block {block} was given to someone else under {transfer}")
            if self.pool.blocks[block].ref_cnt == 0:
                self.breach(name, f"block {block} is free under {transfer}")

    def note_prefixes(self) -> None:
        """Remember what every block hash stands for."""
        size = self.shape.block_size
        for request in self.requests.values():
            for i, h in enumerate(request.block_hashes):
                self.names.setdefault(bytes(h), tuple(request.all_token_ids[: (i + 1) * size]))

    # -- requests ----------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], max_tokens: int, stop: int = 0) -> Request:
        """A request arrives. `stop`: the token that would be its `stop`-th ends it, as an end-of-sequence does."""
        require(request_id not in self.scheduler.requests, f"{request_id} is still known")
        may = request_id not in self.requests or self._may_reuse(request_id)
        require(may, f"the id {request_id} may not come back yet")
        last = oracle.right_output(prompt, stop, self.weights)[-1:] if stop else []
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=last)
        request = Request(request_id, prompt, params, None, block_hasher=self.hasher)
        if request_id in self.requests:
            self.ended.append((request_id, self.requests[request_id]))
        self.requests[request_id] = request
        self.weights_of[id(request)] = self.weights
        self.note_prefixes()
        self.scheduler.add_request(request)
        return request

    def _may_reuse(self, request_id: str) -> bool:
        if any(request_id in flight.output.num_scheduled_tokens for flight in self.flights):
            return False
        if self.shape.reuse_ids == "later":
            return request_id not in self.scheduler.finished_req_ids
        return self.shape.reuse_ids == "at once"

    def all_requests(self) -> list[tuple[str, Request]]:
        """Every request of this run, those whose id was used again included."""
        return [*self.ended, *self.requests.items()]


def _images(data: bytes, block_size: int) -> list[tuple[int, ...]]:
    """Stored bytes as one tuple of cells per layer."""
    values = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    return [tuple(values[i : i + block_size]) for i in range(0, len(values), block_size)]
