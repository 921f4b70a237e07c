"""From measurements to a verdict: the JSON fields, the faults, and the table that a person reads."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from demo.plan import BLOCK_SIZE, TOLERANCE, Plan

Row = tuple[str, str]


def summarize(plan: Plan, runs: Mapping[str, dict[str, Any]], findings: dict[str, Any] | None) -> dict[str, Any]:
    """The run as one flat JSON object. ``runs``: ``reference``, ``cold`` and, unless only that was asked for, ``warm``."""
    reference, cold, warm = runs["reference"], runs["cold"], runs.get("warm")
    checked = [run for run in (cold, warm) if run is not None]
    snapshots = [run["snapshot"] for run in checked]
    values: dict[str, Any] = {
        "tensor_parallel": plan.tensor_parallel,
        "dtype": plan.dtype,
        "connector": plan.connector or "MooncakeLedgerConnector",
        "store_delay_ms": plan.store_delay_ms,
        "store_killed": plan.kill_master,
        "prompts": len(reference["prompts"]),
        "prompt_tokens": sum(map(len, reference["prompts"])),
        "new_tokens": sum(map(len, reference["tokens"])),
        "pool_tokens": plan.pool_blocks * BLOCK_SIZE,
        "outputs_equal": all(run["tokens"] == reference["tokens"] for run in checked),
        "outputs_different": sum(
            one != other for run in checked for one, other in zip(run["tokens"], reference["tokens"], strict=True)
        ),
        "requests_failed": sum(reason != "length" for run in checked for reason in run["finish_reasons"]),
        "hit_tokens": warm["hit_tokens"] if warm else cold["hit_tokens"],
        "hit_tokens_cold": cold["hit_tokens"],
        "preemptions": sum(run["preemptions"] for run in checked),
        "ttft_cold_s": cold["ttft_s"],
        "ttft_warm_s": warm["ttft_s"] if warm else None,
        "ttft_reference_s": reference["ttft_s"],
        "store_jobs": add_counts(snapshot["store_jobs"] for snapshot in snapshots),
        "load_jobs": add_counts(snapshot["load_jobs"] for snapshot in snapshots),
        "blocks_pinned_max": max(snapshot["blocks_pinned_max"] for snapshot in snapshots),
        "blocks_pinned_at_end": sum(snapshot["blocks_pinned"] for snapshot in snapshots),
        "engines_idle": all(run["idle"] for run in checked),
        "idle_after_s": max(run["idle_after_s"] for run in checked),
        "longest_step_s": max(run["longest_step_s"] for run in checked),
        "objects_audited": None,
        "objects_poisoned": None,
    }
    if findings is not None:
        values |= {
            "objects_audited": findings["audited"],
            "objects_poisoned": findings["poisoned"],
            "objects_bit_identical": findings["bit_identical"],
            "objects_max_error": findings["max_error"],
            "objects_tolerance": TOLERANCE,
            "objects_wrong": findings["wrong"],
            "poisoned_examples": findings["examples"],
        }
    values["faults"] = faults(values)
    values["ok"] = not values["faults"]
    return values


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def faults(values: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with a run; empty means that it passed."""
    checks = [
        (not values["outputs_equal"], f"{values['outputs_different']} outputs differ from those without connector"),
        (values["requests_failed"], f"{values['requests_failed']} requests did not finish"),
        (not values["engines_idle"], "an engine did not go idle"),
        (values["blocks_pinned_at_end"], f"{values['blocks_pinned_at_end']} blocks are still pinned"),
        (not values["preemptions"], "no preemption happened: the pool was not small enough to show anything"),
        (values["ttft_warm_s"] is not None and not values["hit_tokens"], "no token was served from the store"),
        (not values["objects_audited"] and not values["store_killed"], "the store holds no object to audit"),
        (values["objects_poisoned"], f"{values['objects_poisoned']} objects in the store hold wrong bytes"),
    ]
    return [fault for wrong, fault in checks if wrong]


def table(values: Mapping[str, Any]) -> str:
    """The same as aligned text."""
    rows: list[Row] = [
        ("prompts", f"{values['prompts']} (greedy, {values['new_tokens']} new tokens, {values['dtype']})"),
        ("prompt tokens", f"{values['prompt_tokens']} (the KV pool holds {values['pool_tokens']})"),
        ("tokens hit in the store", hits(values)),
        ("TTFT, median", ttft(values)),
        ("outputs equal", equal(values)),
        ("preemptions", str(values["preemptions"])),
        ("store jobs", counts_text(values["store_jobs"])),
        ("load jobs", counts_text(values["load_jobs"])),
        ("most blocks pinned at once", str(values["blocks_pinned_max"])),
        ("blocks still pinned", str(values["blocks_pinned_at_end"])),
        ("objects audited / poisoned", audited(values)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def hits(values: Mapping[str, Any]) -> str:
    if values["store_killed"]:
        return f"{values['hit_tokens_cold']} (the store was killed during the run)"
    if values["ttft_warm_s"] is None:
        return f"{values['hit_tokens_cold']} cold"
    share = values["hit_tokens"] / values["prompt_tokens"]
    return f"{values['hit_tokens']} warm ({share:.0%} of the prompt tokens), {values['hit_tokens_cold']} cold"


def ttft(values: Mapping[str, Any]) -> str:
    warm = values["ttft_warm_s"]
    times = f"{values['ttft_cold_s']:.2f} s cold" + (f" / {warm:.2f} s warm" if warm is not None else "")
    return f"{times} (all prompts arrive at once, so most of it is waiting for a turn)"


def equal(values: Mapping[str, Any]) -> str:
    runs = "cold" if values["ttft_warm_s"] is None else "cold and warm"
    if values["outputs_equal"]:
        return f"yes ({runs}, token by token, against an engine without connector)"
    return f"NO: {values['outputs_different']} differ ({runs})"


def audited(values: Mapping[str, Any]) -> str:
    if values["objects_audited"] is None:
        return "not done: the store is gone"
    text = f"{values['objects_audited']} / {values['objects_poisoned']}"
    wrong = ", ".join(f"{count} {name}" for name, count in values["objects_wrong"].items())
    exact = f"{values['objects_bit_identical']} bit-identical, the others within {values['objects_max_error']:.1g}"
    return f"{text} ({wrong or exact}; tolerance {values['objects_tolerance']:g} of an object's largest value)"


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number) or "none"
