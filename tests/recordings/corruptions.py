"""Ways to corrupt a recording: each breaks one promise at one event, and names the rule that must notice.

A corruption changes the list of events (the header is number 0) and returns the number of the event at which the
recording stops being a behaviour of the model. Most put something else in the place of the first event of a kind that
can be changed like that: those are told by a lambda of `e`, the event, and `k`, what was `Known` before it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from conformance.recordings.recording import Event
from tests.recordings.known import Known, first

Events = list[Event]
NAME = "0123456789abcdef"  # of no block


class Corruption(NamedTuple):
    """`name` is a test's; `rule` is the one of `Trace.tla` that is broken."""

    name: str
    recording: str
    rule: str
    corrupt: Callable[[Events], int]


CORRUPTIONS: list[Corruption] = []


def of(recording: str, rule: str) -> Callable[[Callable[[Events], int]], None]:
    """Register a function that corrupts the events of a recording."""
    return lambda corrupt: CORRUPTIONS.append(Corruption(corrupt.__name__, recording, rule, corrupt))


def changed(recording: str, name: str, action: str, rule: str, change: Callable[[Event, Known], Any]) -> None:
    """Register a change of one event. `change` answers the fields that are others then, or the events that stand in its
    place, of which the last is wrong; or something false, where the event does not serve."""

    def corrupt(events: Events) -> int:
        i, known = first(events, action, change)
        new = change(events[i], known)
        events[i : i + 1] = instead = new if isinstance(new, list) else [events[i] | new]
        return i + len(instead) - 1

    CORRUPTIONS.append(Corruption(name, recording, rule, corrupt))


def ends_in(event: Event, blocks: set[int]) -> Any:
    others = blocks - set(event["table"])
    return others and {"table": [*event["table"][:-1], min(others)]}


def orphans(known: Known) -> set[int]:
    """Targets of loads that go on although their generation has ended."""
    return {load["blocks"][0] for load in known.loads if known.gens.get(load["req"]) != load["gen"]}


def into_anothers(event: Event, known: Known) -> Any:
    others = {known.tables[r][-1] for r in known.gens if r != event["req"]} - set(event["blocks"]) - known.pinned
    return others and {"blocks": [*event["blocks"][:-1], min(others)]}


def fails_a_load(event: Event, known: Known) -> Any:
    return event["bad"] and known.jobs[event["job"]]["action"] == "EmitLoad"


def late(event: Event, known: Known) -> bool:
    """It settles a store of an older generation."""
    job = known.jobs.get(event["job"], {})
    return "retry" in event and job["action"] == "EmitStore" and known.gens.get(job["req"], 0) > job["gen"]


def released(event: Event, known: Known) -> Event:
    return {"action": "Release", "job": event["job"], "blocks": known.jobs[event["job"]]["blocks"]}


def with_first(event: Event) -> Event:
    return {key: [event[whole][0], *event[key]] for key, whole in (("blocks", "table"), ("names", "hashes"))}


def with_known(event: Event, known: Known) -> Any:
    """It passed over blocks that are stored; now it stores the first of them again."""
    passed = range(known.frontier[event["req"]], event["frontier"])
    again = [i for i in passed if event["hashes"][i] in known.stored][:1]
    if event["job"] is not None or known.jobs or not again:
        return None
    return {"job": known.next_job} | {
        "blocks": [event["table"][i] for i in again],
        "names": [event["hashes"][i] for i in again],
    }


def beyond_budget(event: Event, known: Known) -> Any:
    at, full = event["frontier"], len(known.pinned | set(event["blocks"])) == known.budget
    if not event["job"] or not full or at >= event["storable"] or event["table"][at] in known.pinned:
        return None
    return {
        "blocks": [*event["blocks"], event["table"][at]],
        "names": [*event["names"], event["hashes"][at]],
        "frontier": at + 1,
    }


def still_waiting(event: Event, known: Known) -> set[int]:
    return set(known.retry[event["req"]]) & set(event["retry"])


def owner(event: Event, known: Known) -> Any:
    return known.jobs[event["job"]]["req"]


def bystanders(event: Event, known: Known) -> set[str]:
    targets = set(known.jobs[event["job"]]["blocks"])
    return {r for r in known.gens if not targets & set(known.tables[r])} if event.get("tainted") else set()


def a_store(load: Event, known: Known) -> Event:
    """A store of the blocks just loaded, by the request that loaded them."""
    table = known.tables[load["req"]]
    start = table.index(load["blocks"][0])
    stop = start + len(load["blocks"])
    hashes = [*(f"{i:016x}" for i in range(start)), *load["names"]]
    job = max(known.next_job, load["job"] + 1)
    facts = {"req": load["req"], "gen": load["gen"], "job": job, "storable": stop, "frontier": stop, "retry": []}
    blocks = {"blocks": table[:stop], "names": hashes, "table": table, "hashes": hashes}
    return {"action": "EmitStore", **facts, **blocks}


storm, aborts, resets = partial(changed, "storm-tp2"), partial(changed, "aborts"), partial(changed, "resets")
failed_puts, sync_loads = partial(changed, "failed-puts"), partial(changed, "sync-load-failures")

# fmt: off
# Where generations begin and end, and the blocks they begin on
storm("generation_number_used_twice", "BeginGeneration", "GenerationIsNew",
      lambda e, k: k.last_gen and {"gen": k.last_gen})
# What vLLM#52360 looks like from outside: a block that a job still reads has been given away.
storm("admitted_on_a_pinned_block", "BeginGeneration", "PinnedNotFreed", lambda e, k: ends_in(e, k.pinned))
storm("grown_into_a_pinned_block", "EmitStore", "PinnedNotFreed",
      lambda e, k: e["table"][-1] not in e["blocks"] and ends_in(e, k.pinned))
# An aborted request's load goes on; its targets stay its own until every rank has reported.
aborts("target_of_an_aborted_load_given_away", "BeginGeneration", "PinnedNotFreed", lambda e, k: ends_in(e, orphans(k)))
storm("end_of_another_generation", "EndGeneration", "GenerationIsCurrent", lambda e, k: {"gen": e["gen"] - 1})
storm("request_gone_with_its_generation", "EndGeneration", "NoGeneration",
      lambda e, k: e["why"] == "finished" and {"action": "EndRequest"})
storm("unknown_event", "EndGeneration", "KnownEvent", lambda e, k: {"action": "EndOfTheWorld"})

# Loads, and what is forgotten when one fails
storm("loaded_twice", "EmitLoad", "LoadWasAccepted", lambda e, k: [e, e | {"job": k.next_job + 1}])
storm("load_under_another_name", "EmitLoad", "TargetsInTable", lambda e, k: {"names": [NAME, *e["names"][1:]]})
storm("load_into_a_pinned_block", "EmitLoad", "TargetsNotPinned",
      lambda e, k: k.pinned and {"blocks": [min(k.pinned), *e["blocks"][1:]]})
storm("two_loads_into_one_block", "EmitLoad", "TargetsNotLoading",
      lambda e, k: k.loads and {"blocks": [*k.loads[0]["blocks"][:1], *e["blocks"][1:]]})
storm("load_into_a_block_of_somebody_else", "EmitLoad", "TargetsNotShared", into_anothers)
resets("reset_ends_an_open_load", "Reset", "OpenLoadsStay", lambda e, k: e["loading"] and {"loading": e["loading"][1:]})

# Reports and releases
storm("report_twice", "ApplyReport", "FirstReportOfThisRank", lambda e, k: [e, e])
storm("report_of_unknown_job", "ApplyReport", "JobIsLive", lambda e, k: {"job": 1000})
storm("report_of_a_third_rank", "ApplyReport", "RankIsKnown", lambda e, k: {"rank": 2})
storm("done_with_a_bad_block", "ApplyReport", "GoodIffDone", lambda e, k: e["result"] == "DONE" and {"bad": [0]})
failed_puts("bad_block_outside_the_job", "ApplyReport", "BadIsInJob",
            lambda e, k: e["bad"] and {"bad": [*e["bad"], len(k.jobs[e["job"]]["blocks"])]})
storm("release_before_every_rank_reported", "ApplyReport", "OwedByThisJob",
      lambda e, k: "retry" not in e and [e, released(e, k)])
storm("release_other_blocks", "Release", "TheBlocksPinned", lambda e, k: {"blocks": [*e["blocks"][:-1], 20]})
failed_puts("failed_block_given_up_too_early", "ApplyReport", "FailedComeBack",
            lambda e, k: e["bad"] and e.get("retry") and {"retry": e["retry"][1:]})
failed_puts("good_block_stored_again", "ApplyReport", "FailedComeBack",
            lambda e, k: e["result"] == "DONE" and not e.get("retry", [0]) and {"retry": [0]})
storm("report_of_an_old_generation_counts", "ApplyReport", "OldGenerationHarmless",
      lambda e, k: late(e, k) and {"retry": [*e["retry"], 1]})

# Stores: what is issued, under which name, in which order, within which budget
storm("job_id_used_twice", "EmitStore", "JobIdIsNext",
      lambda e, k: e["job"] and k.next_job > 1 and {"job": k.next_job - 1})
storm("store_under_another_name", "EmitStore", "NamesBelongToBlocks",
      lambda e, k: e["job"] and {"names": [NAME, *e["names"][1:]]})
storm("store_for_an_ended_generation", "EmitStore", "GenerationIsCurrent",
      lambda e, k: e["job"] and {"gen": e["gen"] + 50})
storm("block_skipped", "EmitStore", "NothingSkipped",
      lambda e, k: len(e["blocks"]) > 1 and {"blocks": e["blocks"][1:], "names": e["names"][1:]})
storm("frontier_beyond_complete_blocks", "EmitStore", "FrontierWithinStorable",
      lambda e, k: e["job"] and e["frontier"] == e["storable"] and {"storable": e["storable"] - 1})
storm("frontier_moves_back", "EmitStore", "FrontierGrows", lambda e, k: k.frontier[e["req"]] and {"frontier": 0})
storm("known_block_stored_again", "EmitStore", "NotStoredTwice", with_known)
storm("block_behind_the_frontier_stored", "EmitStore", "BlocksAreDue",
      lambda e, k: e["job"] and k.frontier[e["req"]] and 0 not in k.retry[e["req"]] and with_first(e))
storm("budget_exceeded", "EmitStore", "WithinBudget", beyond_budget)
storm("issued_and_waiting", "EmitStore", "IssuedIsNotRetried",
      lambda e, k: e["job"] and {"retry": [e["table"].index(e["blocks"][0])]})
storm("waits_without_a_reason", "EmitStore", "RetryHasReason",
      lambda e, k: not k.retry[e["req"]] and not k.jobs and e["hashes"][0] in k.stored and {"retry": [0]})
failed_puts("waiting_block_lost", "EmitStore", "RetryNotLost",
            lambda e, k: (both := still_waiting(e, k)) and {"retry": sorted({*e["retry"]} - {min(both)})})

# What follows from a synchronous load that failed:
# somebody who computes on a block that did not arrive would store what comes of it.
sync_loads("sharer_not_tainted", "ApplyReport", "TaintedAreThoseWhoShare",
           lambda e, k: len(e.get("tainted", ())) > 1 and {"tainted": [owner(e, k)]})
sync_loads("owner_not_tainted", "ApplyReport", "TaintedAreThoseWhoShare",
           lambda e, k: e.get("tainted") and {"tainted": [r for r in e["tainted"] if r != owner(e, k)]})
sync_loads("bystander_tainted", "ApplyReport", "TaintedAreThoseWhoShare",
           lambda e, k: (other := bystanders(e, k)) and {"tainted": [*e["tainted"], min(other)]})
sync_loads("bad_block_stays_in_the_cache", "EvictTainted", "EvictsWhatRestsOnIt",
           lambda e, k: e["blocks"] and {"blocks": e["blocks"][1:]})
sync_loads("good_block_leaves_the_cache", "EvictTainted", "EvictsNothingElse",
           lambda e, k: e["blocks"] and k.tables[e["req"]][0] not in e["blocks"] and {"blocks": k.tables[e["req"]]})
# Between the step that loads and its report nobody knows whether the bytes have arrived.
sync_loads("store_on_an_unresolved_target", "EmitLoad", "StorableNow", lambda e, k: e["sync"] and [e, a_store(e, k)])
# fmt: on


@of("storm-tp2", "LoadWasAccepted")
def load_that_vllm_did_not_accept(events: Events) -> int:
    i, _ = first(events, "EmitLoad")
    begin = next(e for e in reversed(events[:i]) if e["action"] == "BeginGeneration" and e["req"] == events[i]["req"])
    begin["external"] = 0
    return i


@of("failed-loads", "FailedHitNotOffered")
def failed_hit_offered_again(events: Events) -> int:
    i, known = first(events, "ApplyReport", fails_a_load)
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
    i, _ = first(events, "ApplyReport", fails_a_load)
    del events[i + 1]
    return i + 1


@of("failed-loads", "TheHashesLost")
def other_hashes_forgotten(events: Events) -> int:
    i, _ = first(events, "ApplyReport", fails_a_load)
    events[i + 1]["names"] = [NAME]
    return i + 1


@of("storm-tp2", "OwedFirst")
def forget_a_release(events: Events) -> int:
    i, _ = first(events, "Release")
    del events[i]
    return i


@of("resets", "GenerationIsCurrent")
def store_after_a_reset(events: Events) -> int:
    """A reset ends the generation; its request may run on, but must not store old bytes under the new epoch."""
    i, known = first(events, "Reset", lambda e, k: set(k.gens) - set(e["loading"]))
    req = min(set(known.gens) - set(events[i]["loading"]))
    old = next(e for e in reversed(events[:i]) if e["action"] == "EmitStore" and e["req"] == req)
    events.insert(i + 1, {**old, "job": known.next_job})
    return i + 1


@of("sync-load-failures", "OwedFirst")
def nothing_evicted(events: Events) -> int:
    i, _ = first(events, "EvictTainted")
    while events[i]["action"] == "EvictTainted":
        del events[i]
    return i


@of("sync-load-failures", "StorableNow")
def store_on_tainted_bytes(events: Events) -> int:
    i, known = first(events, "ApplyReport", lambda e, k: e.get("tainted"))
    after = i + 2 + len(events[i]["tainted"])  # the report, what is forgotten, what is evicted
    events.insert(after, a_store(known.jobs[events[i]["job"]], known))
    return after
