"""kvledger's state, abstracted, against the model's variables.

Both sides are brought into one form, a `View`, and compared field by field. Two things are looked at through a coarser
eye. Generation numbers: only whether a job belongs to its request's current generation. Where the budget is smaller than
the pool, frontier and retry: what is still to be stored. kvledger does not look at a request while the budget is used up,
the model does, and notes what it passes over.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.refinement.adapter import LedgerAdapter
from conformance.refinement.world import State
from kvledger.protocol import LedgerView, OpenJobView, TrackerView

LIVES = {"queued": "queued", "running": "running", "quar": "quarantined"}
LOADS = {"loaded": "none"}
"""The model does not keep that a load has arrived."""


@dataclass(frozen=True, slots=True)
class View:
    """What is compared. The name of a field is what a divergence says."""

    references: tuple[int, ...]
    next_job: int
    open_jobs_and_who_reported: dict[int, frozenset[int]]
    jobs: dict[int, tuple[Any, ...]]
    """Kind, sync, blocks, hashes; of a store its block indices; whether it is of its request's current generation."""
    pins: dict[int, frozenset[int]]
    known_stored: frozenset[str]
    trackers: dict[str, tuple[Any, ...]]
    """Frontier and retry (or what is to be stored), how often each block has been given back for a retry, load."""
    requests_whose_hit_failed: frozenset[str]
    jobs_of_steps: list[frozenset[int]]
    """Of each step in flight, the oldest first."""
    jobs_of_ranks: list[dict[int, str]]
    unread_reports: list[dict[int, tuple[int, ...]]]
    """Bad block indices."""
    found_by_a_lookup: dict[tuple[int, str], Any]
    """Content under the key that kvledger makes of a hash now."""


KeyEpoch = Callable[[int], int]


def epoch_of_key(epoch: int) -> int:
    """The epoch in the key of an object (the model's `KeyOf`)."""
    return epoch


_views: dict[tuple[int, KeyEpoch, bool], tuple[State, View]] = {}


def model_view(state: State, key_epoch: KeyEpoch, coarse: bool) -> View:
    """The model's side; computed once per state."""
    known = _views.get((id(state), key_epoch, coarse))
    if known is None:
        known = _views[id(state), key_epoch, coarse] = (state, _model_view(state, key_epoch, coarse))
    return known[1]


def forget_views() -> None:
    """Give the memory back (after a graph)."""
    _views.clear()


def _model_view(state: State, key_epoch: KeyEpoch, coarse: bool) -> View:
    live = {j: e for j, e in enumerate(state["led"], 1) if e["st"] == "live"}
    jobs = {}
    for j in live:
        job = state["job"][j - 1]
        if job["kind"] == "none":  # the model forgets the message of a job that every rank is through with
            continue
        items = sorted(job["items"])
        indices = tuple(i - 1 for i, _, _ in items) if job["kind"] == "store" else ()
        current = state["trk"][job["req"] - 1]["gen"] == job["gen"]
        names = tuple(h.encode() for _, _, h in items)
        jobs[j] = (job["kind"], job["sync"], tuple(b for _, b, _ in items), names, indices, current)
    return View(
        references=tuple(state["ref"]),
        next_job=state["nextJob"],
        open_jobs_and_who_reported={j: frozenset(k - 1 for k in e["rep"]) for j, e in live.items()},
        jobs=jobs,
        pins={j: e["held"] for j, e in live.items()},
        known_stored=state["known"],
        trackers={
            str(r): (
                *_to_store(
                    t["front"], frozenset(i - 1 for i in t["retry"]), coarse, state["rp"][r - 1], state["known"]
                ),
                {i: n for i, n in enumerate(t["att"]) if n},
                LOADS.get(t["load"], t["load"]),
            )
            for r, t in enumerate(state["trk"], 1)
            if t["gen"]
        },
        requests_whose_hit_failed=frozenset(str(r) for r, gone in enumerate(state["nohit"], 1) if gone),
        jobs_of_steps=[step["jobs"] for step in state["pipe"] if step["on"]],
        jobs_of_ranks=[{j: LIVES[e["st"]] for j, e in enumerate(row, 1) if e["st"] in LIVES} for row in state["rk"]],
        unread_reports=[
            {j: tuple(sorted(e["bad"])) for j, e in enumerate(row, 1) if e["st"] == "ready"} for row in state["rk"]
        ],
        found_by_a_lookup={
            (k, h): None if content[0] == "none" else content
            for k, shard in enumerate(state["store"])
            for (h, e), content in shard.items()
            if e == key_epoch(state["epoch"])
        },
    )


def code_view(adapter: LedgerAdapter, model: View) -> View:
    """kvledger's side; `model` says only which hashes and keys there are."""
    ledger, ranks = adapter.view(), [rank.view() for rank in adapter.rank]
    letters = {h for _, h in model.found_by_a_lookup}
    return View(
        references=tuple([b.ref_cnt for b in adapter.pool.blocks[1:]][: len(model.references)]),
        next_job=ledger.next_job,
        open_jobs_and_who_reported={j: e.rep for j, e in ledger.led.items()},
        jobs={j: _job(ledger, e) for j, e in ledger.led.items() if j in model.jobs or j not in model.pins},
        pins={j: frozenset(e.held) for j, e in ledger.led.items()},
        known_stored=frozenset(h for h in letters if h.encode() in ledger.known),
        trackers={r: _tracker(adapter, r, t, ledger.known) for r, t in ledger.trk.items()},
        requests_whose_hit_failed=ledger.nohit,
        jobs_of_steps=[frozenset(job.job_id for job in jobs) for jobs, _ in adapter.pipe],
        jobs_of_ranks=[{j: life.value for j, life in rank.lives.items()} for rank in ranks],
        unread_reports=[
            {r.job_id: tuple(adapter.indices[r.job_id][p] for p in r.bad) for r in rank.ready} for rank in ranks
        ],
        found_by_a_lookup={
            (k, h): adapter.objects.get(k, h.encode(), ledger.epoch) for k, h in model.found_by_a_lookup
        },
    )


def _to_store(
    frontier: int, retry: frozenset[int], coarse: bool, prompt: Sequence[Any], known: Container[Any]
) -> tuple[Any, ...]:
    """Frontier and retry; with the coarser eye the blocks that are neither issued nor believed stored."""
    if not coarse:
        return frontier, retry
    return (frozenset(i for i in {*range(frontier, len(prompt)), *retry} if prompt[i] not in known),)


def _tracker(adapter: LedgerAdapter, name: str, tracker: TrackerView, known: frozenset[bytes]) -> tuple[Any, ...]:
    most = adapter.bounds.max_attempts  # the code counts the failure that ends it, too
    tries = {i: min(n, most) for i, n in tracker.att.items() if most}
    prompt = adapter.requests[name].block_hashes
    to_store = _to_store(tracker.front, tracker.retry, adapter.coarse, prompt, known)
    return (*to_store, tries, LOADS.get(tracker.load.value, tracker.load.value))


def _job(ledger: LedgerView, entry: OpenJobView) -> tuple[Any, ...]:
    job, tracker = entry.job, ledger.trk.get(entry.req)
    current = tracker is not None and tracker.gen == job.generation
    return (job.kind.value, job.sync, job.block_ids, job.hashes, entry.items, current)


def differences(adapter: LedgerAdapter, state: State, key_epoch: KeyEpoch = epoch_of_key) -> list[str]:
    """Where kvledger's state differs from the model's."""
    model = model_view(state, key_epoch, adapter.coarse)
    code = code_view(adapter, model)
    if code == model:
        return []
    pairs = [(f.name, getattr(code, f.name), getattr(model, f.name)) for f in dataclasses.fields(View)]
    return [_tell(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


def _tell(name: str, code: Any, model: Any) -> str:
    if name == "references":
        wrong = [
            f"block {b} has {mine} references, {'held by kvledger' if mine > theirs else 'not held by kvledger'}, model {theirs}"
            for b, (mine, theirs) in enumerate(zip(code, model, strict=True), 1)
            if mine != theirs
        ]
        return ", ".join(wrong)
    if isinstance(code, dict):
        keys = [k for k in {**code, **model} if code.get(k) != model.get(k)]
        code, model = {k: code[k] for k in keys if k in code}, {k: model[k] for k in keys if k in model}
    return f"{name.replace('_', ' ')}: {_plain(code)}, model {_plain(model)}"


def _plain(value: Any) -> str:
    return str(value).replace("frozenset()", "{}").replace("frozenset({", "{").replace("})", "}")


def answers(adapter: LedgerAdapter, state: State) -> list[str]:
    """Where the answers that kvledger gives to core differ from the model's `HasPending…`."""
    live = [e for e in state["led"] if e["st"] == "live"]
    pins = {b: sum(b in e["held"] for e in live) for e in live for b in e["held"]}
    frees = not state["stalled"] and any(state["ref"][b - 1] == count for b, count in pins.items())
    wrong = []
    if adapter.side.has_pending_block_frees() != frees:
        wrong.append(f"has_pending_block_frees: {not frees}, model {frees}")
    if adapter.side.has_open_jobs() != bool(live):
        wrong.append(f"has_pending_push_work: {not live}, model {bool(live)}")
    return wrong
