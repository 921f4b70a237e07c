"""Corruptions of where generations begin and end, and of the blocks they begin on."""

from tests.recordings.corruptions.recording import Events, Known, first, of


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
