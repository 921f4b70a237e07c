"""Corruptions of stores: what is issued, under which name, in which order, within which budget."""

from tests.recordings.corruptions.recording import NAME, Event, Events, Known, first, issues, of


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
