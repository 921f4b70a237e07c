"""The forward of one step on one rank: what it reads, computes, writes and samples, and what of that is wrong.

Inputs are those of the moment at which core scheduled the step. The bytes are those of the moment at which the forward
runs, which may be much later: two steps may be in flight.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from kvledger_conformance.engine import compat, oracle
from kvledger_conformance.engine.memory import Rank

if TYPE_CHECKING:
    from kvledger_conformance.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part in a step, as core scheduled it: positions `start` to `stop` of its tokens."""

    request: Request
    table: tuple[int, ...]
    start: int
    stop: int
    known: tuple[int, ...]
    """Tokens that core knew then; the ones behind are sampled by steps before this one, on the rank itself."""
    samples: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A forward that read wrong KV: a breach (property, what), unless core throws away what came of it."""

    breach: tuple[str, str]
    blocks: frozenset[int]
    request: Request


@dataclass(eq=False)
class Flight:
    """One step between schedule() and update_from_output()."""

    output: Any
    metadata: Any
    works: tuple[Work, ...]
    fail_forward: bool = False
    told: set[int] = field(default_factory=set)
    """Ranks whose hooks have run."""
    marks: dict[int, int] = field(default_factory=dict)
    """Number of its forward on each rank's stream."""
    sampled: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    transfers: dict[int, Any] = field(default_factory=dict)
    suspects: list[Suspect] = field(default_factory=list)

    def result(self, rank: Rank) -> Any:
        """What the rank's model runner answers."""
        return compat.runner_output(self.sampled[rank.index], self.transfers[rank.index])


def works_of(output: Any, requests: dict[str, Request], tables: dict[str, list[int]]) -> tuple[Work, ...]:
    """The parts of a step, right after schedule(), which has advanced the requests already."""
    made = []
    for request_id, count in output.num_scheduled_tokens.items():
        request = requests[request_id]
        stop, known = request.num_computed_tokens, tuple(request.all_token_ids)
        samples = compat.samples(request)
        made.append(Work(request, tuple(tables[request_id]), stop - count, stop, known, samples))
    return tuple(made)


@dataclass
class Forward:
    """Runs forwards on one rank of an engine."""

    engine: "Engine"
    rank: Rank

    def run(self, flight: Flight) -> None:
        """The whole step."""
        sampled = flight.sampled.setdefault(self.rank.index, {})
        for work in flight.works:
            guesses = self.engine.guesses.setdefault(id(work.request), {})
            tokens = (*work.known, *(guesses[p] for p in range(len(work.known), work.stop)))[: work.stop]
            self._check_inputs(flight, work, tokens)
            self._check_writes(work)
            last = self._compute(work, tokens)
            if work.samples and self.rank.index == 0:
                guesses[work.stop] = oracle.next_token(last)
            sampled[work.request.request_id] = [guesses[work.stop]] if work.samples else []

    def _compute(self, work: Work, tokens: tuple[int, ...]) -> int:
        size, last, table = self.engine.shape.block_size, 0, work.table
        for layer, cells in enumerate(self.rank.cells):
            previous = oracle.seed(layer, self.rank.index, self.engine.weights)
            if work.start:
                previous = int(cells[table[(work.start - 1) // size], (work.start - 1) % size])
            for position in range(work.start, work.stop):
                previous = oracle.cell(previous, tokens[position])
                cells[table[position // size], position % size] = previous
            last = previous if layer == 0 else last
        return last

    def _check_inputs(self, flight: Flight, work: Work, tokens: tuple[int, ...]) -> None:
        """Whether the KV that this forward reads is the prefix's own."""
        size = self.engine.shape.block_size
        for layer, cells in enumerate(self.rank.cells):
            right = oracle.cells(tokens[: work.start], layer, self.rank.index, self.engine.weights)
            for position, value in enumerate(right):
                block = work.table[position // size]
                if int(cells[block, position % size]) == value:
                    continue
                breach = self._wrong_input(work, tokens, position // size, block)
                flight.suspects.append(Suspect(breach, frozenset({block}), work.request))
                return

    def _wrong_input(self, work: Work, tokens: tuple[int, ...], index: int, block: int) -> tuple[str, str]:
        loaded, first = id(work.request) in self.engine.attempts, index * self.engine.shape.block_size
        old = any(
            int(self.rank.cells[0][block, 0]) == oracle.cells(tokens, 0, self.rank.index, w)[first]
            for w in range(self.engine.weights)
        )
        name = "nothing-stale-after-reset" if old else "load-errors-complete" if loaded else "computes-on-right-bytes"
        what = f"computes on wrong KV in block {block} (its block {index}) of rank {self.rank.index}"
        why = ", which an earlier load should have filled" if loaded else ""
        return name, f"{work.request.request_id} {what}{why}"

    def _check_writes(self, work: Work) -> None:
        size = self.engine.shape.block_size
        written = {work.table[p // size] for p in range(work.start, work.stop)}
        for transfer in self.engine.world.moving():
            touched = written & set(transfer.notes.get("blocks", ()))
            if touched and self.engine.rank_of(transfer.client) == self.rank.index:
                self.engine.breach("no-write-under-dma", f"the forward writes {sorted(touched)} under {transfer}")
