"""Corruptions of loads, and of what is forgotten when one fails."""

from tests.recordings.corruptions.recording import NAME, Event, Events, Known, first, of


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
