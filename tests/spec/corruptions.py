"""Ways to corrupt a recording: each breaks one promise at one event, and names the rule that must notice.

A corruption changes the list of events (the header is number 0) and returns the number of the event at which the
recording stops being a behaviour of the model. `Known` replays what a recording says so far, to find a place for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
Events = list[Event]
Corruption = Callable[[Events], int]
CORRUPTIONS: list[tuple[str, Corruption, str]] = []  # recording, corruption, rule
NAME = "0123456789abcdef"  # of no block


def of(recording: str, rule: str) -> Callable[[Corruption], Corruption]:
    """Register a corruption of a recording and the rule that it breaks."""

    def register(corrupt: Corruption) -> Corruption:
        CORRUPTIONS.append((recording, corrupt, rule))
        return corrupt

    return register


@dataclass
class Known:
    """What a recording has said before an event."""

    jobs: dict[int, Event] = field(default_factory=dict)  # open jobs
    pinned: set[int] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)  # names in finished stores
    tables: dict[str, list[int]] = field(default_factory=dict)  # of current generations
    gens: dict[str, int] = field(default_factory=dict)
    retry: dict[str, list[int]] = field(default_factory=dict)
    frontier: dict[str, int] = field(default_factory=dict)
    next_job: int = 1
    last_gen: int = 0

    def take(self, event: Event) -> None:
        action, req = event["action"], event.get("req")
        if action == "BeginGeneration":
            self.gens[req], self.last_gen = event["gen"], event["gen"]
            self.tables[req], self.retry[req], self.frontier[req] = event["table"], [], 0
        elif action in ("EndGeneration", "EndRequest"):
            self.gens.pop(req, None)
            self.tables.pop(req, None)
        elif action == "EmitStore":
            self.tables[req], self.retry[req], self.frontier[req] = event["table"], event["retry"], event["frontier"]
        if action in ("EmitLoad", "EmitStore") and event["job"] is not None:
            self.jobs[event["job"]] = event
            self.next_job = event["job"] + 1
            self.pinned |= set(event["blocks"]) if action == "EmitStore" else set()
        elif action == "ApplyReport" and "retry" in event:
            done = self.jobs.pop(event["job"])
            stores = [e for e in self.jobs.values() if e["action"] == "EmitStore"]
            self.pinned = {b for e in stores for b in e["blocks"]}
            if done["action"] == "EmitStore":
                self.retry[done["req"]] = event["retry"]
                self.stored |= set(done["names"])
        elif action == "Reset":
            self.gens = {r: g for r, g in self.gens.items() if r in event["loading"]}


def replay(events: Events) -> Iterator[tuple[int, Event, Known]]:
    """Each event with its number, and what was known before it."""
    known = Known()
    for i, event in enumerate(events):
        yield i, event, known
        known.take(event)


def first(events: Events, action: str, wanted: Callable[[Event, Known], Any] = lambda e, k: True) -> tuple[int, Known]:
    """The first event of a kind that fits, and what was known before it."""
    for i, event, known in replay(events):
        if event["action"] == action and wanted(event, known):
            return i, known
    raise LookupError(f"the recording has no {action} that could be corrupted like this")


def issues(event: Event, _: Known) -> bool:
    return event.get("job") is not None


# -- reports and releases ----------------------------------------------------


@of("storm-tp2", "FirstReportOfThisRank")
def report_twice(events: Events) -> int:
    i, _ = first(events, "ApplyReport")
    events.insert(i + 1, dict(events[i]))
    return i + 1


@of("storm-tp2", "JobIsLive")
def report_of_unknown_job(events: Events) -> int:
    i, _ = first(events, "ApplyReport")
    events[i]["job"] = 1000
    return i


@of("storm-tp2", "RankIsKnown")
def report_of_a_third_rank(events: Events) -> int:
    i, _ = first(events, "ApplyReport")
    events[i]["rank"] = 2
    return i


@of("storm-tp2", "GoodIffDone")
def done_with_a_bad_block(events: Events) -> int:
    i, _ = first(events, "ApplyReport", lambda e, k: e["result"] == "DONE")
    events[i]["bad"] = [0]
    return i


@of("failed-puts", "BadIsInJob")
def bad_block_outside_the_job(events: Events) -> int:
    i, known = first(events, "ApplyReport", lambda e, k: e["bad"])
    events[i]["bad"] = [*events[i]["bad"], len(known.jobs[events[i]["job"]]["blocks"])]
    return i


@of("storm-tp2", "OwedByThisJob")
def release_before_every_rank_reported(events: Events) -> int:
    i, known = first(events, "ApplyReport", lambda e, k: "retry" not in e)
    job = events[i]["job"]
    events.insert(i + 1, {"action": "Release", "job": job, "blocks": known.jobs[job]["blocks"]})
    return i + 1


@of("storm-tp2", "OwedFirst")
def forget_a_release(events: Events) -> int:
    i, _ = first(events, "Release")
    del events[i]
    return i


@of("storm-tp2", "TheBlocksPinned")
def release_other_blocks(events: Events) -> int:
    i, _ = first(events, "Release")
    events[i]["blocks"] = [*events[i]["blocks"][:-1], 20]
    return i


@of("failed-puts", "FailedComeBack")
def failed_block_given_up_too_early(events: Events) -> int:
    i, _ = first(events, "ApplyReport", lambda e, k: e["bad"] and e.get("retry"))
    events[i]["retry"] = events[i]["retry"][1:]
    return i


@of("failed-puts", "FailedComeBack")
def good_block_stored_again(events: Events) -> int:
    i, _ = first(events, "ApplyReport", lambda e, k: e["result"] == "DONE" and not e.get("retry", [0]))
    events[i]["retry"] = [0]
    return i


@of("storm-tp2", "OldGenerationHarmless")
def report_of_an_old_generation_counts(events: Events) -> int:
    def late(event: Event, known: Known) -> bool:
        job = known.jobs.get(event["job"], {})
        return "retry" in event and job["action"] == "EmitStore" and known.gens.get(job["req"], 0) > job["gen"]

    i, _ = first(events, "ApplyReport", late)
    events[i]["retry"] = [*events[i]["retry"], 1]
    return i


# -- generations -------------------------------------------------------------


@of("storm-tp2", "GenerationIsNew")
def generation_number_used_twice(events: Events) -> int:
    i, known = first(events, "BeginGeneration", lambda e, k: k.last_gen > 0)
    events[i]["gen"] = known.last_gen
    return i


@of("storm-tp2", "PinnedNotFreed")
def admitted_on_a_pinned_block(events: Events) -> int:
    """What vLLM#52360 looks like from outside: a block that a job still reads has been given away."""
    i, known = first(events, "BeginGeneration", lambda e, k: k.pinned - set(e["table"]))
    events[i]["table"][-1] = min(known.pinned - set(events[i]["table"]))
    return i


@of("storm-tp2", "PinnedNotFreed")
def grown_into_a_pinned_block(events: Events) -> int:
    i, known = first(
        events, "EmitStore", lambda e, k: k.pinned - set(e["table"]) and not set(e["table"][-1:]) & set(e["blocks"])
    )
    events[i]["table"][-1] = min(known.pinned - set(events[i]["table"]))
    return i


@of("aborts", "PinnedNotFreed")
def target_of_an_aborted_load_given_away(events: Events) -> int:
    """An aborted request's load goes on; its targets stay its own until every rank has reported."""

    def lonely(known: Known) -> list[int]:
        return [
            e["blocks"][0]
            for e in known.jobs.values()
            if e["action"] == "EmitLoad" and known.gens.get(e["req"]) != e["gen"]
        ]

    i, known = first(events, "BeginGeneration", lambda e, k: lonely(k))
    events[i]["table"][-1] = lonely(known)[0]
    return i


@of("storm-tp2", "GenerationIsCurrent")
def end_of_another_generation(events: Events) -> int:
    i, _ = first(events, "EndGeneration")
    events[i]["gen"] -= 1
    return i


@of("storm-tp2", "NoGeneration")
def request_gone_with_its_generation(events: Events) -> int:
    i, _ = first(events, "EndGeneration", lambda e, k: e["why"] == "finished")
    events[i] = {"action": "EndRequest", "req": events[i]["req"]}
    return i


@of("storm-tp2", "KnownEvent")
def unknown_event(events: Events) -> int:
    i, _ = first(events, "EndGeneration")
    events[i]["action"] = "EndOfTheWorld"
    return i


# -- stores ------------------------------------------------------------------


@of("storm-tp2", "JobIdIsNext")
def job_id_used_twice(events: Events) -> int:
    i, known = first(events, "EmitStore", lambda e, k: e["job"] is not None and k.next_job > 1)
    events[i]["job"] = known.next_job - 1
    return i


@of("storm-tp2", "NamesBelongToBlocks")
def store_under_another_name(events: Events) -> int:
    i, _ = first(events, "EmitStore", issues)
    events[i]["names"] = [NAME, *events[i]["names"][1:]]
    return i


@of("storm-tp2", "GenerationIsCurrent")
def store_for_an_ended_generation(events: Events) -> int:
    i, _ = first(events, "EmitStore", issues)
    events[i]["gen"] += 50
    return i


@of("resets", "GenerationIsCurrent")
def store_after_a_reset(events: Events) -> int:
    """A reset ends the generation; its request may run on, but must not store old bytes under the new epoch."""
    i, known = first(events, "Reset", lambda e, k: set(k.gens) - set(e["loading"]))
    req = min(set(known.gens) - set(events[i]["loading"]))
    old = next(e for e in reversed(events[:i]) if e["action"] == "EmitStore" and e["req"] == req)
    events.insert(i + 1, {**old, "job": known.next_job})
    return i + 1


@of("storm-tp2", "NothingSkipped")
def block_skipped(events: Events) -> int:
    i, _ = first(events, "EmitStore", lambda e, k: issues(e, k) and len(e["blocks"]) > 1)
    events[i]["blocks"], events[i]["names"] = events[i]["blocks"][1:], events[i]["names"][1:]
    return i


@of("storm-tp2", "FrontierWithinStorable")
def frontier_beyond_complete_blocks(events: Events) -> int:
    i, _ = first(events, "EmitStore", lambda e, k: issues(e, k) and e["frontier"] == e["storable"])
    events[i]["storable"] -= 1
    return i


@of("storm-tp2", "FrontierGrows")
def frontier_moves_back(events: Events) -> int:
    i, _ = first(events, "EmitStore", lambda e, k: k.frontier[e["req"]] > 0)
    events[i]["frontier"] = 0
    return i


@of("storm-tp2", "NotStoredTwice")
def known_block_stored_again(events: Events) -> int:
    def skips(event: Event, known: Known) -> bool:
        passed = event["hashes"][known.frontier[event["req"]] : event["frontier"]]
        return event["job"] is None and bool(set(passed) & known.stored) and not known.jobs

    i, known = first(events, "EmitStore", skips)
    at = next(
        k
        for k in range(known.frontier[events[i]["req"]], events[i]["frontier"])
        if events[i]["hashes"][k] in known.stored
    )
    events[i] |= {"job": known.next_job, "blocks": [events[i]["table"][at]], "names": [events[i]["hashes"][at]]}
    return i


@of("storm-tp2", "BlocksAreDue")
def block_behind_the_frontier_stored(events: Events) -> int:
    i, _ = first(
        events, "EmitStore", lambda e, k: issues(e, k) and k.frontier[e["req"]] > 0 and 0 not in k.retry[e["req"]]
    )
    event = events[i]
    event["blocks"], event["names"] = [event["table"][0], *event["blocks"]], [event["hashes"][0], *event["names"]]
    return i


@of("storm-tp2", "WithinBudget")
def budget_exceeded(events: Events) -> int:
    budget = events[0]["max_pinned"]

    def full(event: Event, known: Known) -> bool:
        at = event["frontier"]
        fits = len(known.pinned | set(event["blocks"])) == budget
        return issues(event, known) and fits and at < event["storable"] and event["table"][at] not in known.pinned

    i, _ = first(events, "EmitStore", full)
    event = events[i]
    at = event["frontier"]
    event["blocks"], event["names"] = [*event["blocks"], event["table"][at]], [*event["names"], event["hashes"][at]]
    event["frontier"] += 1
    return i


@of("storm-tp2", "IssuedIsNotRetried")
def issued_and_waiting(events: Events) -> int:
    i, _ = first(events, "EmitStore", issues)
    events[i]["retry"] = [events[i]["table"].index(events[i]["blocks"][0])]
    return i


@of("storm-tp2", "RetryHasReason")
def waits_without_a_reason(events: Events) -> int:
    i, _ = first(events, "EmitStore", lambda e, k: not k.retry[e["req"]] and e["hashes"][0] in k.stored and not k.jobs)
    events[i]["retry"] = [0]
    return i


@of("failed-puts", "RetryNotLost")
def waiting_block_lost(events: Events) -> int:
    def stays(event: Event, known: Known) -> bool:
        return bool(set(known.retry[event["req"]]) & set(event["retry"]))

    i, known = first(events, "EmitStore", stays)
    both = set(known.retry[events[i]["req"]]) & set(events[i]["retry"])
    events[i]["retry"] = sorted(set(events[i]["retry"]) - {min(both)})
    return i


# -- loads -------------------------------------------------------------------


@of("storm-tp2", "LoadWasAccepted")
def load_that_vllm_did_not_accept(events: Events) -> int:
    i, _ = first(events, "EmitLoad")
    begin = next(e for e in reversed(events[:i]) if e["action"] == "BeginGeneration" and e["req"] == events[i]["req"])
    begin["external"] = 0
    return i


@of("storm-tp2", "LoadWasAccepted")
def loaded_twice(events: Events) -> int:
    i, known = first(events, "EmitLoad")
    events.insert(i + 1, {**events[i], "job": known.next_job + 1})
    return i + 1


@of("storm-tp2", "TargetsInTable")
def load_under_another_name(events: Events) -> int:
    i, _ = first(events, "EmitLoad")
    events[i]["names"] = [NAME, *events[i]["names"][1:]]
    return i


@of("storm-tp2", "TargetsNotPinned")
def load_into_a_pinned_block(events: Events) -> int:
    i, known = first(events, "EmitLoad", lambda e, k: k.pinned)
    events[i]["blocks"] = [min(known.pinned), *events[i]["blocks"][1:]]
    return i


@of("storm-tp2", "TargetsNotLoading")
def two_loads_into_one_block(events: Events) -> int:
    def targets(known: Known) -> list[int]:
        return [e["blocks"][0] for e in known.jobs.values() if e["action"] == "EmitLoad"]

    i, known = first(events, "EmitLoad", lambda e, k: targets(k))
    events[i]["blocks"] = [targets(known)[0], *events[i]["blocks"][1:]]
    return i


@of("storm-tp2", "TargetsNotShared")
def load_into_a_block_of_somebody_else(events: Events) -> int:
    def others(event: Event, known: Known) -> set[int]:
        return {known.tables[r][-1] for r in known.gens if r != event["req"]} - set(event["blocks"]) - known.pinned

    i, known = first(events, "EmitLoad", others)
    events[i]["blocks"] = [*events[i]["blocks"][:-1], min(others(events[i], known))]
    return i


@of("failed-loads", "FailedHitNotOffered")
def failed_hit_offered_again(events: Events) -> int:
    i, known = first(events, "ApplyReport", lambda e, k: e["bad"] and k.jobs[e["job"]]["action"] == "EmitLoad")
    req, begin = known.jobs[events[i]["job"]]["req"], known.last_gen + 1
    again = {"action": "BeginGeneration", "req": req, "gen": begin, "table": [], "hashes": [], "external": 32}
    events.insert(i + 2, again)  # after the Forget
    return i + 2


@of("failed-loads", "RequestIsAdmitted")
def readmitted_as_the_same_generation(events: Events) -> int:
    """Nothing of the load arrived, so vLLM freed the blocks: what the old generation knew of them is void."""

    def restarts(event: Event, known: Known) -> bool:
        job = known.jobs.get(event["job"], {"action": ""})
        lost = job["action"] == "EmitLoad" and 0 in event["bad"] and job["blocks"][0] == known.tables[job["req"]][0]
        return lost and known.gens.get(job["req"]) == job["gen"]

    i, known = first(events, "ApplyReport", restarts)
    load = known.jobs[events[i]["job"]]
    of_it = [k for k in range(i, len(events)) if events[k].get("req") == load["req"]]
    begin, store = of_it[:2]
    events[store]["gen"] = load["gen"]
    del events[begin]
    return store - 1


@of("failed-loads", "OwedFirst")
def lost_hashes_not_forgotten(events: Events) -> int:
    i, _ = first(events, "ApplyReport", lambda e, k: e["bad"] and k.jobs[e["job"]]["action"] == "EmitLoad")
    del events[i + 1]
    return i + 1


@of("failed-loads", "TheHashesLost")
def other_hashes_forgotten(events: Events) -> int:
    i, _ = first(events, "ApplyReport", lambda e, k: e["bad"] and k.jobs[e["job"]]["action"] == "EmitLoad")
    events[i + 1]["names"] = [NAME]
    return i + 1


@of("resets", "OpenLoadsStay")
def reset_ends_an_open_load(events: Events) -> int:
    i, _ = first(events, "Reset", lambda e, k: e["loading"])
    events[i]["loading"] = events[i]["loading"][1:]
    return i


# -- synchronous loads -------------------------------------------------------


def a_taint(events: Events, sharers: int = 1) -> tuple[int, Known]:
    return first(events, "ApplyReport", lambda e, k: len(e.get("tainted", ())) >= sharers)


@of("sync-load-failures", "TaintedAreThoseWhoShare")
def sharer_not_tainted(events: Events) -> int:
    """Somebody who computes on a block that did not arrive would store what comes of it."""
    i, known = a_taint(events, sharers=2)
    owner = known.jobs[events[i]["job"]]["req"]
    events[i]["tainted"] = [r for r in events[i]["tainted"] if r == owner]
    return i


@of("sync-load-failures", "TaintedAreThoseWhoShare")
def owner_not_tainted(events: Events) -> int:
    i, known = a_taint(events)
    owner = known.jobs[events[i]["job"]]["req"]
    events[i]["tainted"] = [r for r in events[i]["tainted"] if r != owner]
    return i


@of("sync-load-failures", "TaintedAreThoseWhoShare")
def bystander_tainted(events: Events) -> int:
    def bystanders(event: Event, known: Known) -> set[str]:
        targets = set(known.jobs[event["job"]]["blocks"])
        return {r for r in known.gens if not targets & set(known.tables[r])}

    i, known = first(events, "ApplyReport", lambda e, k: e.get("tainted") and bystanders(e, k))
    events[i]["tainted"] = [*events[i]["tainted"], min(bystanders(events[i], known))]
    return i


@of("sync-load-failures", "EvictsWhatRestsOnIt")
def bad_block_stays_in_the_cache(events: Events) -> int:
    i, _ = first(events, "EvictTainted", lambda e, k: e["blocks"])
    events[i]["blocks"] = events[i]["blocks"][1:]
    return i


@of("sync-load-failures", "EvictsNothingElse")
def good_block_leaves_the_cache(events: Events) -> int:
    i, known = first(events, "EvictTainted", lambda e, k: e["blocks"] and k.tables[e["req"]][0] not in e["blocks"])
    events[i]["blocks"] = known.tables[events[i]["req"]]
    return i


@of("sync-load-failures", "OwedFirst")
def nothing_evicted(events: Events) -> int:
    i, _ = first(events, "EvictTainted")
    while events[i]["action"] == "EvictTainted":
        del events[i]
    return i


@of("sync-load-failures", "StorableNow")
def store_on_tainted_bytes(events: Events) -> int:
    i, known = a_taint(events)
    after = i + 2 + len(events[i]["tainted"])  # the report, what is forgotten, what is evicted
    load = known.jobs[events[i]["job"]]
    events.insert(after, a_store(load, known))
    return after


@of("sync-load-failures", "StorableNow")
def store_on_an_unresolved_target(events: Events) -> int:
    """Between the step that loads and its report nobody knows whether the bytes have arrived."""
    i, known = first(events, "EmitLoad", lambda e, k: e["sync"])
    known.take(events[i])
    events.insert(i + 1, a_store(events[i], known))
    return i + 1


def a_store(load: Event, known: Known) -> Event:
    """A store of the blocks just loaded, by the request that loaded them."""
    table = known.tables[load["req"]]
    start = table.index(load["blocks"][0])
    stop = start + len(load["blocks"])
    hashes = [*(f"{i:016x}" for i in range(start)), *load["names"]]
    facts = {
        "req": load["req"],
        "gen": load["gen"],
        "job": known.next_job,
        "storable": stop,
        "frontier": stop,
        "retry": [],
    }
    blocks = {"blocks": table[:stop], "names": hashes, "table": table, "hashes": hashes}
    return {"action": "EmitStore", **facts, **blocks}
