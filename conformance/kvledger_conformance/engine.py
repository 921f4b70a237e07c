"""An engine without a model: vLLM's real scheduler, block pool and aggregator around any connector.

Only the forward is replaced, by the arithmetic of `oracle`. Everything that a connector can see is vLLM's own: hook
order, scheduler outputs, block references, the aggregation over ranks. Transfers move only between steps or where a
step says so, so a run is a function of its script although the connector's threads are real.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request, RequestStatus

from kvledger_conformance import compat, oracle
from kvledger_conformance.memory import Rank
from kvledger_conformance.properties import Impossible, Violation
from kvledger_conformance.standin import World
from kvledger_conformance.transfer import Transfer
from kvledger_conformance.watch import settle


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
    note: Callable[[str], None]
    requests: dict[str, Request] = field(default_factory=dict)
    ended: list[tuple[str, Request]] = field(default_factory=list)
    names: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    loads: dict[str, LoadWatch] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    incarnation: dict[int, int] = field(default_factory=dict)
    found: list[Violation] = field(default_factory=list)
    accepted: list[Request] = field(default_factory=list)
    past: frozenset[str] = frozenset()
    passed: dict[str, str] = field(default_factory=dict)
    paused: bool = True
    refine: Callable[["Engine"], None] | None = None
    reset_seen: bool = False
    borrowed: bool = False
    """While the harness itself holds blocks."""
    starve: int = 0
    preemptions: int = 0
    weights: int = 0
    steps: int = 0
    weights_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world.on_begin = self._transfer_begins
        self.world.on_commit = self._object_stored
        self.world.on_read = self._blocks_read
        self._watch_pool()
        self._watch_allocation()
        self._watch_admission()
        self._lock = threading.Lock()

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

    def breach(self, violation: Violation) -> None:
        """A property is broken: raise, unless this run looks past that property for what lies behind it."""
        if violation.name not in self.past:
            raise violation
        self.passed.setdefault(violation.name, violation.what)

    # -- watching transfers (called from the connector's threads) ----------

    def _report(self, name: str, what: str) -> None:
        with self._lock:
            if name in self.past:
                self.passed.setdefault(name, what)
            else:
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

    def step(self, *, pace: str = "late", fail_forward: bool = False) -> Any:
        """One engine step. What it submits to the store runs after the step (pace "late"), before the step collects
        ("early"), or as soon as it can, even before the forward ("rush")."""
        self.steps += 1
        self.clock.now += 1.0
        self.preemptions = self.preemptions_now()
        output = self.scheduler.schedule()
        self.starve = 0 if output.preempted_req_ids else max(0, self.starve - 1)
        self._after_schedule(output)
        self.check()
        # A synchronous load is waited for inside its hook, so nothing may be paused then.
        self.paused = pace != "rush" and not getattr(output, "has_sync_kv_loads", False)
        self.world.pause(self.paused)
        suspects: list[tuple[Violation, set[int]]] = []
        results = [self._run_rank(rank, output, pace, fail_forward, suspects) for rank in self.ranks]
        result = results[0] if len(results) == 1 else self.aggregator.aggregate(results)
        self._after_ranks(output, result, suspects)
        self.scheduler.update_from_output(output, result)
        self.note_prefixes()
        self.check()
        self.world.pause(False)
        settle()
        self.check()
        return output

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

    def _run_rank(
        self, rank: Rank, output: Any, pace: str, fail_forward: bool, suspects: list[tuple[Violation, set[int]]]
    ) -> Any:
        sampled: dict[str, list[int]] = {}

        def forward() -> None:
            if pace == "rush":
                settle()
            if fail_forward:
                raise ForwardFailedError("scripted")
            self._forward(rank, output, sampled, suspects)

        def before_collect() -> None:
            if pace == "early":
                self.world.pause(False)
            settle()
            self.world.pause(self.paused)

        with compat.as_rank(rank.index, len(self.ranks)), compat.cpu_worker():
            metadata = compat.metadata_for(output, len(self.ranks))
            transfers = compat.run_hooks(rank.connector, output, metadata, forward, before_collect)
        self._note_load_reports(rank, transfers)
        return compat.runner_output(sampled, transfers)

    def _note_load_reports(self, rank: Rank, transfers: Any) -> None:
        for request_id in transfers.finished_recving or ():
            watch = self.loads.get(request_id)
            if watch is None or rank.index not in watch.waiting:
                what = f"rank {rank.index} reports a load of {request_id} unasked"
                self.breach(Violation("one-completion-per-load", what))
                continue
            watch.waiting.discard(rank.index)
            self.note(f"rank {rank.index}: load of {request_id} reported")
        if transfers.invalid_block_ids:
            self.note(f"rank {rank.index}: blocks {sorted(transfers.invalid_block_ids)} reported bad")

    def _forward(
        self, rank: Rank, output: Any, sampled: dict[str, list[int]], suspects: list[tuple[Violation, set[int]]]
    ) -> None:
        tables = self.tables()
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            stop = request.num_computed_tokens  # schedule() has advanced it already
            table = tables[request_id]
            self._check_inputs(rank, request, table, stop - count, suspects)
            self._check_writes(rank, table, stop - count, stop)
            last = self._compute(rank, request, table, stop - count, stop)
            sampled[request_id] = [oracle.next_token(last)] if stop >= request.num_tokens else []

    def _compute(self, rank: Rank, request: Request, table: list[int], start: int, stop: int) -> int:
        size, last = self.shape.block_size, 0
        for layer, cells in enumerate(rank.cells):
            previous = oracle.seed(layer, rank.index, self.weights)
            if start:
                previous = int(cells[table[(start - 1) // size], (start - 1) % size])
            for position in range(start, stop):
                previous = oracle.cell(previous, request.all_token_ids[position])
                cells[table[position // size], position % size] = previous
            last = previous if layer == 0 else last
        return last

    def _check_inputs(
        self, rank: Rank, request: Request, table: list[int], start: int, suspects: list[tuple[Violation, set[int]]]
    ) -> None:
        """Whether the KV that this forward reads is the prefix's own."""
        size = self.shape.block_size
        tokens = tuple(request.all_token_ids[:start])
        for layer, cells in enumerate(rank.cells):
            right = oracle.cells(tokens, layer, rank.index, self.weights)
            for position, value in enumerate(right):
                block = table[position // size]
                if int(cells[block, position % size]) == value:
                    continue
                suspects.append((self._wrong_input(rank, request, position // size, block), {block}))
                return

    def _wrong_input(self, rank: Rank, request: Request, index: int, block: int) -> Violation:
        loaded = self.attempts.get(id(request), 0) > 0
        old = self.weights and any(
            int(rank.cells[0][block, 0])
            == oracle.cells(tuple(request.all_token_ids), 0, rank.index, w)[index * self.shape.block_size]
            for w in range(self.weights)
        )
        name = "nothing-stale-after-reset" if old else "load-errors-complete" if loaded else "computes-on-right-bytes"
        return Violation(
            name,
            f"{request.request_id} computes on wrong KV in block {block} (its block {index}) of rank {rank.index}"
            + (", which an earlier load should have filled" if loaded else ""),
        )

    def _check_writes(self, rank: Rank, table: list[int], start: int, stop: int) -> None:
        size = self.shape.block_size
        written = {table[p // size] for p in range(start, stop)}
        for transfer in self.world.moving():
            if self.rank_of(transfer.client) == rank.index:
                touched = written & set(transfer.notes.get("blocks", ()))
                if touched:
                    what = f"the forward writes {sorted(touched)} under {transfer}"
                    self.breach(Violation("no-write-under-dma", what))

    def _after_ranks(self, output: Any, result: Any, suspects: list[tuple[Violation, set[int]]]) -> None:
        """A synchronous load that failed is reported in the same step, and core throws the step's work away."""
        transfers = result.kv_connector_output
        invalid = set(transfers.invalid_block_ids or ()) if transfers is not None else set()
        for violation, blocks in suspects:
            if not getattr(output, "has_sync_kv_loads", False) or not blocks & invalid:
                self.breach(violation)
        for request_id in (transfers.finished_recving or ()) if transfers is not None else ():
            self.loads.pop(request_id, None)

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
                self.breach(Violation("references-exact", what))
        if self.refine is not None and not self.borrowed:
            self.refine(self)
        if self.world.closed_calls:
            self.breach(Violation("no-call-after-close", ", ".join(self.world.closed_calls)))

    def _check_transfer(self, transfer: Transfer) -> None:
        for block, incarnation in transfer.notes.get("blocks", {}).items():
            name = "blocks-held-during-dma"
            if self.incarnation.get(block, 0) != incarnation:
                self.breach(Violation(name, f"block {block} was given to someone else under {transfer}"))
            if self.pool.blocks[block].ref_cnt == 0:
                self.breach(Violation(name, f"block {block} is free under {transfer}"))

    def note_prefixes(self) -> None:
        """Remember what every block hash stands for."""
        size = self.shape.block_size
        for request in self.requests.values():
            for i, h in enumerate(request.block_hashes):
                self.names.setdefault(bytes(h), tuple(request.all_token_ids[: (i + 1) * size]))

    # -- requests ----------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """A request arrives."""
        if request_id in self.scheduler.requests:
            raise Impossible(f"{request_id} is still known")
        if request_id in self.requests and not self._may_reuse(request_id):
            raise Impossible(f"the id {request_id} may not come back yet")
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(request_id, prompt, params, None, block_hasher=self.hasher)
        if request_id in self.requests:
            self.ended.append((request_id, self.requests[request_id]))
        self.requests[request_id] = request
        self.weights_of[id(request)] = self.weights
        self.note_prefixes()
        self.scheduler.add_request(request)
        return request

    def _may_reuse(self, request_id: str) -> bool:
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


def build_engine(
    shape: compat.Shape,
    world: World,
    clock: VirtualClock,
    make_connector: Callable[[KVConnectorRole, int], Any],
    make_scheduler: Callable[[], Any],
    note: Callable[[str], None],
) -> Engine:
    """Ranks first, then the scheduler, as vLLM builds them."""
    ranks = []
    for index in range(shape.ranks):
        world.building = f"rank{index}"
        with compat.as_rank(index, shape.ranks), compat.cpu_worker():
            connector = make_connector(KVConnectorRole.WORKER, index)
            ranks.append(Rank.build(index, connector, shape.num_blocks, shape.block_size))
    world.building = "lookup"
    with compat.as_rank(0, shape.ranks):
        scheduler = make_scheduler()
    hasher = compat.make_hasher(shape.block_size)
    return Engine(
        shape=shape,
        world=world,
        clock=clock,
        scheduler=scheduler,
        ranks=ranks,
        aggregator=KVOutputAggregator.from_connector(scheduler.connector, shape.ranks),
        hasher=hasher,
        note=note,
    )
