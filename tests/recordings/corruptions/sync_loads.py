"""Corruptions of what follows from a synchronous load that failed."""

from tests.recordings.corruptions.recording import Event, Events, Known, first, of


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
