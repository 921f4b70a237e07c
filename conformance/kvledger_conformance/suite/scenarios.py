"""Scripts that are always run: public bug reports and known weaknesses, retold as actions.

Each names where it comes from and the property that a connector with that bug breaks. They are the fast part of a run
on a strange connector; the state machines go on from there.
"""

from dataclasses import dataclass, field
from typing import Any

from kvledger_conformance.engine.compat import Shape
from kvledger_conformance.suite.driver import Script


@dataclass(frozen=True, slots=True)
class Scenario:
    """`breaks`: the property that a connector with this bug breaks. `past`: what may break before that and would hide it;
    other scenarios look for it."""

    name: str
    source: str
    breaks: str
    script: Script
    shape: Shape = field(default_factory=Shape)
    finish: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    past: frozenset[str] = frozenset()


def _do(action: str, **arguments: Any) -> dict[str, Any]:
    return {"do": action, **arguments}


def _add(name: str, blocks: str, tail: int = 1, tokens: int = 2, **more: Any) -> dict[str, Any]:
    return _do("add", name=name, blocks=blocks, tail=tail, tokens=tokens, **more)


STEP = _do("step")
PREEMPTED = [_do("until_preempted")]
"""Steps until core has preempted: some connectors may first ask it to wait."""
BYTES = frozenset({"blocks-held-during-dma", "stored-bytes-right", "computes-on-right-bytes", "load-errors-complete"})
STORED_AND_FORGOTTEN = [_add("a", "abc"), _do("steps", count=8), _do("forget")]
"""Prompt abc is in the store and not in the local cache."""

STOPS_WITH_A_STEP_IN_FLIGHT = [_add("x", "d", tokens=8, stop=3), *[STEP] * 4]
"""x has got its last token, and one more step for it is in flight: its blocks are free, if core does not defer that."""
LOADS_NEXT = [_add("b", "abc", tail=2, tokens=4), _do("step", pace="early"), _do("steps", count=6)]
"""A load that is over before the forwards in flight have run."""

SCENARIOS = (
    Scenario(
        "blocks of a preempted request under a running store",
        "vLLM #52360",
        "blocks-held-during-dma",
        [
            _do("hold", rank=0, operation="put"),
            _add("a", "abc", tokens=8),
            STEP,
            _do("preempt"),
            *PREEMPTED,
            _do("forget"),
            _do("steps", count=3),
        ],
    ),
    Scenario(
        "late result of an older generation of the same request id",
        "vLLM #51637",
        "goes-idle",
        [
            _do("hold", rank=0, operation="put"),
            _add("a", "ab", tokens=8),
            STEP,
            _do("preempt"),
            *PREEMPTED,
            STEP,
            _do("open"),
            _do("steps", count=12),
        ],
        past=BYTES,
    ),
    Scenario(
        "the same with two ranks at different speeds",
        "vLLM #51637",
        "goes-idle",
        [
            _do("hold", rank=1, operation="put"),
            _add("a", "ab", tokens=8),
            STEP,
            _do("preempt"),
            *PREEMPTED,
            STEP,
            STEP,
            _do("open"),
            _do("steps", count=12),
        ],
        Shape(ranks=2),
        past=BYTES,
    ),
    Scenario(
        "existence check raises",
        "vLLM PR #43742",
        "goes-idle",
        [
            _do("fault", operation="exists", kind="raise", rank=0, times=2),
            _add("a", "abc", tokens=4),
            _do("steps", count=6),
        ],
    ),
    Scenario(
        "existence check answers a short list",
        "W-22",
        "engine-alive",
        [
            _add("a", "abc", tokens=2),
            _do("steps", count=8),
            _do("fault", operation="exists", kind="short", times=2),
            _add("b", "abcd", tokens=2),
            _do("steps", count=3),
        ],
    ),
    Scenario(
        "the id of a finished request comes back before the next schedule",
        "contract: id reuse; needs unique ids switched off",
        "engine-alive",
        [_add("a", "a", tail=0, tokens=1), STEP, _add("a", "b", tail=0, tokens=1)],
    ),
    Scenario(
        "put raises, then answers None",
        "vLLM PR #43742",
        "goes-idle",
        [
            _do("fault", operation="put", kind="raise"),
            _do("fault", operation="put", kind="none"),
            _add("a", "abc", tokens=4),
            _do("steps", count=6),
            _add("b", "bcd", tokens=4),
            _do("steps", count=6),
        ],
    ),
    Scenario(
        "short list from a get",
        "W-10",
        "load-errors-complete",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="short"),
            _add("b", "abc", tail=2),
            _do("steps", count=8),
        ],
    ),
    Scenario(
        "get answers None",
        "vLLM #35943, PR #50984",
        "goes-idle",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="none"),
            _add("b", "abc", tail=2),
            _do("steps", count=8),
        ],
    ),
    Scenario(
        "middle block of a load fails on one rank",
        "vLLM PR #42788",
        "load-errors-complete",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704, position=1, rank=1),
            _add("b", "abc", tail=2),
            _do("steps", count=8),
        ],
        Shape(ranks=2),
    ),
    Scenario(
        "first part of a load fails on the second rank",
        "W-01",
        "load-errors-complete",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704, position=0, rank=1),
            _add("b", "abc", tail=2),
            _do("steps", count=8),
        ],
        Shape(ranks=2),
    ),
    Scenario(
        "load whose key is gone, over and over",
        "W-25, vLLM #55297",
        "bounded-retries",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704, times=None),
            _add("b", "abc", tail=2),
            _do("steps", count=40),
        ],
    ),
    Scenario(
        "same-step resume after a reset of running requests",
        "W-20",
        "engine-alive",
        [
            _add("a", "ab", tokens=8),
            _do("steps", count=3),
            _do("reset", running=True),
            _do("steps", count=2),
        ],
    ),
    Scenario(
        "same-step resume that hits the store",
        "W-20",
        "goes-idle",
        [
            _add("a", "abc", tokens=8),
            _do("steps", count=4),
            _do("reset", running=True),
            _do("steps", count=4),
        ],
    ),
    Scenario(
        "abort while a load is out",
        "contract G3",
        "one-completion-per-load",
        [
            *STORED_AND_FORGOTTEN,
            _do("hold", rank=0, operation="get"),
            _add("b", "abc", tail=2),
            STEP,
            _do("abort", name="b"),
            _do("steps", count=3),
            _do("forget"),
            _do("open"),
        ],
    ),
    Scenario(
        "silent store and a full pool",
        "W-47, W-48",
        "bounded-pins",
        [
            *[_add(n, b, tokens=4) for n, b in (("a", "abc"), ("b", "bcd"), ("c", "cde"), ("d", "def"), ("e", "efa"))],
            _add("f", "fab", tokens=4),
            _do("silent"),
        ],
    ),
    Scenario(
        "late put: the call gave up, its bytes still move",
        "Mooncake -800",
        "blocks-held-during-dma",
        [
            _do("fault", operation="put", kind="late"),
            _add("a", "abc", tokens=2),
            _do("steps", count=4),
            _do("forget"),
        ],
    ),
    Scenario(
        "late get: the call gave up, its bytes still arrive",
        "Mooncake -800",
        "computes-on-right-bytes",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="late"),
            _add("b", "abc", tail=2, tokens=8),
            _do("steps", count=4),
            _do("land"),
            _do("steps", count=3),
        ],
    ),
    Scenario(
        "new weights under the same hashes",
        "design: reset",
        "nothing-stale-after-reset",
        [_add("a", "abc"), _do("steps", count=10), _do("new_weights"), _add("b", "abc")],
    ),
    Scenario(
        "the forward raises while saves are told",
        "W-04",
        "stored-bytes-right",
        [_add("a", "abc"), _do("crash")],
    ),
    Scenario(
        "transfers run as soon as they are told",
        "vllm-ascend#4412",
        "stored-bytes-right",
        [_add("a", "abc"), _do("step", pace="rush"), STEP, _add("b", "bcd"), _do("step", pace="rush"), STEP],
    ),
    Scenario(
        "a request longer than a step",
        "W-05 kind",
        "stored-bytes-right",
        [_add("a", "abcd", tail=2, tokens=4), STEP, STEP, STEP],
        Shape(max_num_batched_tokens=6),
    ),
    Scenario(
        "second job of a request overtakes the first on one rank",
        "vLLM #51637",
        "blocks-held-during-dma",
        [
            _do("hold", rank=1, operation="put"),
            _add("a", "abcd", tail=2, tokens=8),
            *[STEP] * 4,
            _do("preempt"),
            *PREEMPTED,
            _do("forget"),
            *[STEP] * 2,
        ],
        Shape(ranks=2, max_num_batched_tokens=8),
    ),
    Scenario(
        "two loads, the queued one aborted",
        "contract G3",
        "one-completion-per-load",
        [
            *STORED_AND_FORGOTTEN,
            _do("hold", rank=0, operation="get"),
            _add("b", "abc", tail=2),
            _add("c", "ab", tail=3),
            STEP,
            _do("abort", name="c"),
            *[STEP] * 3,
            _do("open"),
        ],
    ),
    Scenario(
        "a failed load that others share",
        "model finding F2",
        "stored-bytes-right",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704),
            _add("b", "abcd", tail=2, tokens=4),
            _add("c", "abcd", tail=1, tokens=4),
            _do("steps", count=6),
        ],
        Shape(max_num_batched_tokens=32),
    ),
    Scenario(
        "a failed store of a preempted request",
        "vLLM #51637 kind",
        "refines-the-model",
        [
            _do("fault", operation="put", kind="code", code=-600),
            _do("hold", rank=0, operation="put"),
            _add("a", "abc", tokens=8),
            STEP,
            _do("abort", name="a"),
            STEP,
            _add("a", "b", tail=2, tokens=8),
            STEP,
            _do("open"),
            *[STEP] * 3,
        ],
    ),
    Scenario(
        "a store that outlives its request",
        "kind: has_pending_push_work",
        "goes-idle",
        [_do("hold", rank=0, operation="put"), _add("a", "abc", tokens=1), _do("steps", count=4)],
    ),
    Scenario(
        "late bytes in memory that another load uses by now",
        "Mooncake -800",
        "load-errors-complete",
        [
            _add("a", "abc"),
            _do("steps", count=8),
            _add("d", "bca"),
            _do("steps", count=8),
            _do("forget"),
            _do("fault", operation="get", kind="late"),
            _add("b", "abc", tail=2),
            STEP,
            STEP,
            _do("hold", rank=0, operation="get", phase="after"),
            _add("c", "bca", tail=2),
            STEP,
            _do("land"),
            _do("open"),
            _do("steps", count=4),
        ],
    ),
    Scenario(
        "a failed load whose request is preempted before it computes again",
        "found by machine late (docs/found.md, K2)",
        "load-errors-complete",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704),
            _add("b", "abcd", tail=2, tokens=5),
            STEP,
            _do("preempt"),
            _do("steps", count=3),
        ],
    ),
    Scenario(
        "a failed load whose request is aborted before it computes again",
        "found by machine late (docs/found.md, K2)",
        "computes-on-right-bytes",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704),
            _add("b", "abcd", tail=2, tokens=5),
            STEP,
            _do("abort", name="b"),
            _add("c", "abcd", tail=1, tokens=5),
            _do("steps", count=3),
        ],
    ),
    Scenario(
        "more requests than blocks",
        "W-47 kind",
        "goes-idle",
        [
            *[_add(n, b, tokens=12) for n, b in (("a", "abc"), ("b", "bcd"), ("c", "cde"), ("d", "def"))],
            _do("steps", count=60),
        ],
    ),
    Scenario(
        "an abort that core hears of with the output of the step that runs",
        "EngineCore._process_aborts_queue",
        "goes-idle",
        [
            _do("hold", rank=0, operation="put"),
            _add("a", "abc", tokens=8),
            _do("abort", name="a", during=True),
            STEP,
            _do("forget"),
            *[STEP] * 2,
        ],
    ),
    Scenario(
        "two steps in flight: a producer loads into a block that a stopped request's step still writes",
        "W-03",
        "load-errors-complete",
        [*STORED_AND_FORGOTTEN, *STOPS_WITH_A_STEP_IN_FLIGHT, *LOADS_NEXT],
        Shape(depth=2, role="kv_producer"),
    ),
    Scenario(
        "two steps in flight: a producer loads into a block that an aborted request's step still writes",
        "W-03",
        "load-errors-complete",
        [*STORED_AND_FORGOTTEN, _add("x", "d", tokens=8), *[STEP] * 4, _do("abort", name="x"), *LOADS_NEXT],
        Shape(depth=2, role="kv_producer"),
    ),
    Scenario(
        "two steps in flight: the same with a role for which core defers the blocks",
        "W-03, contract G10",
        "load-errors-complete",
        [*STORED_AND_FORGOTTEN, *STOPS_WITH_A_STEP_IN_FLIGHT, *LOADS_NEXT],
        Shape(depth=2),
    ),
    Scenario(
        "two steps in flight: a store is told while the step that computes its blocks has not run",
        "vllm-ascend#4412",
        "stored-bytes-right",
        [_add("a", "abc", tokens=8), _do("step", pace="rush"), _do("step", pace="rush"), _do("abort", name="a"), STEP],
        Shape(depth=2),
    ),
    Scenario(
        "two steps in flight: one rank is a step behind",
        "vLLM #51637 kind",
        "goes-idle",
        [
            _do("hold", rank=1, operation="put"),
            _add("a", "abcd", tail=2, tokens=8),
            *[_do("step", lag="rank1")] * 4,
            _do("abort", name="a"),
            _add("b", "abd", tail=1, tokens=4),
            *[_do("step", lag="rank0")] * 3,
            _do("open"),
            _do("steps", count=4),
        ],
        Shape(ranks=2, depth=2, max_num_batched_tokens=8),
    ),
    Scenario(
        "two steps in flight: preempted with a step in flight, resumed while the store of it is held",
        "vLLM #52360, contract G10",
        "blocks-held-during-dma",
        [
            _do("hold", rank=0, operation="put"),
            _add("a", "abc", tokens=8),
            *[STEP] * 2,
            _do("preempt"),
            *PREEMPTED,
            _do("forget"),
            *[STEP] * 3,
        ],
        Shape(depth=2, role="kv_producer"),
    ),
    Scenario(
        "two steps in flight: a synchronous load fails when the next step is scheduled already",
        "found by this suite (docs/found.md, K3)",
        "outputs-right",
        [
            *STORED_AND_FORGOTTEN,
            _do("fault", operation="get", kind="code", code=-704, position=1),
            _add("b", "abc", tail=2),
            _do("steps", count=8),
        ],
        Shape(depth=2),
    ),
)
