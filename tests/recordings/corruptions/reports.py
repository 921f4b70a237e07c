"""Corruptions of reports and releases."""

from tests.recordings.corruptions.recording import Event, Events, Known, first, of


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
