"""A counterexample as a story: who did what, to which block, with which bytes."""

import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.tla.value import entries, state

WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _bytes(content: tuple[str, int]) -> str:
    name, epoch = content
    return {"junk": "WRONG BYTES", "none": "nothing"}.get(
        name, f"the bytes of {name}" + (f" (weights {epoch})" if epoch else "")
    )


def _items(items: frozenset[tuple[int, int, str]]) -> str:
    return ", ".join(f"block {b} = {h}" for _, b, h in sorted(items))


def _table(table: Any) -> str:
    held = [b for _, b in sorted(entries(table).items()) if b]
    return f"[{' '.join(f'b{b}' for b in held)}]"


def _requests(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    before, after = entries(old["rst"]), entries(new["rst"])
    tables = entries(old["tbl"]), entries(new["tbl"])
    for r in after:
        words = []
        if before[r] != after[r]:
            words.append(f"{before[r]} -> {after[r]}")
            if before[r] == "none":
                words.append(f"prompt {' '.join(entries(entries(new['rp'])[r]).values())}")
        if tables[0][r] != tables[1][r]:
            words.append(f"blocks {_table(tables[0][r])} -> {_table(tables[1][r])}")
        if entries(old["rgen"])[r] != entries(new["rgen"])[r] and entries(new["rgen"])[r]:
            words.append(f"generation {entries(new['rgen'])[r]}")
        if words:
            yield f"request {r}: {', '.join(words)}"


def _jobs(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for j, entry in entries(new["led"]).items():
        was, job = entries(old["led"])[j], entries(new["job"])[j]
        if was["st"] == "none" and entry["st"] == "live":
            pins = f", pins {{{', '.join(f'b{b}' for b in sorted(entry['held']))}}}" if job["kind"] == "store" else ""
            yield f"job {j} emitted: {job['kind']} {_items(job['items'])} (request {job['req']}, generation {job['gen']}{pins})"
        elif was["st"] == "live" and entry["st"] == "done":
            freed = ", ".join(f"b{b}" for b in sorted(was["held"]))
            yield f"job {j} counts as over" + (f": pins on {freed} released" if freed else "")
        elif was["rep"] != entry["rep"]:
            yield f"job {j} is reported by rank {', '.join(map(str, sorted(entry['rep'])))}, others to come"
    if old["trk"] != new["trk"]:
        for r, t in entries(new["trk"]).items():
            was = entries(old["trk"])[r]
            if was["gen"] and not t["gen"]:
                yield f"the tracker of request {r} is gone"
            elif t["gen"] == was["gen"] and not t["retry"] <= was["retry"]:
                yield f"request {r}: blocks {sorted(t['retry'])} are to be stored again"
            elif t["gen"] == was["gen"] and t["load"] != was["load"]:
                yield f"request {r}: its load is {t['load']}"


def _ranks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for k, lives in entries(new["rk"]).items():
        for j, life in entries(lives).items():
            was = entries(entries(old["rk"])[k])[j]
            if was["st"] != life["st"]:
                bad = f", bad {sorted(life['bad'])}" if life["bad"] else ""
                yield f"rank {k}: job {j} {was['st']} -> {life['st']}{bad}"


def _bytes_move(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for k, j, i in sorted(new["dma"] - old["dma"]):
        yield f"rank {k}: bytes of job {j}, index {i} begin to move"
    for k, j, i in sorted(old["dma"] - new["dma"]):
        yield f"rank {k}: bytes of job {j}, index {i} move no more"
    for k, cells in entries(new["mem"]).items():
        for b, content in entries(cells).items():
            if entries(entries(old["mem"])[k])[b] != content:
                yield f"rank {k}: block {b} now holds {_bytes(content)}"
    for k, objects in entries(new["store"]).items():
        for key, content in entries(objects).items():
            if entries(entries(old["store"])[k])[key] != content:
                yield f"store, shard {k}: key {key[0]} now holds {_bytes(content)}"


def _blocks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for b, count in entries(new["ref"]).items():
        was = entries(old["ref"])[b]
        if was != count:
            yield f"block {b}: {was} -> {count} references" + (" (free)" if count == 0 else "")
    steps = entries(new["pipe"])
    sent = [s for s, step in steps.items() if step["on"] and not entries(old["pipe"])[s]["on"]]
    for s in sent:
        work = ", ".join(f"{h} into block {b}" for b, h in sorted(steps[s]["wr"])) or "nothing"
        jobs = ", ".join(map(str, sorted(steps[s]["jobs"]))) or "none"
        yield f"step sent to the ranks: computes {work}; jobs {jobs}"


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """For another module than MooncakeStore: which variables changed, plainly."""
    for name, value in new.items():
        if value != old.get(name):
            yield f"{name} = {value}"


NARRATORS = (_requests, _jobs, _blocks, _ranks, _bytes_move)


def tell(trace: list[tuple[str, str]], violated: str) -> str:
    """The story of a counterexample. Each paragraph is one step: number, actor, action, then what changed."""
    lines = [f"How {violated} fails, in {len(trace)} states:"]
    old: dict[str, Any] | None = None
    for number, (action, text) in enumerate(trace, start=1):
        if action == "Initial":
            old = state(text)
            lines.append(f"{number:3}  nothing has happened yet; every block is free")
            continue
        actor, told = WORDS["by"].get(action, "scheduler"), WORDS["told"].get(action, action)
        lines.append(f"{number:3}  {actor}: {told}  [{action}]")
        if not text or old is None:
            continue
        new = state(text)
        for narrate in NARRATORS if "rst" in new else (_changes,):
            for sentence in narrate(old, new):
                lines += textwrap.wrap(sentence, 116, initial_indent="       ", subsequent_indent="         ")
        old = new
    lines.append(f"     => {violated} does not hold here.")
    return "\n".join(lines)
