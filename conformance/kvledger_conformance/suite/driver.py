"""The verbs: what can happen to an engine, one method per action, recorded so that it can be told and replayed.

An action that does not exist in the state at hand raises `Impossible`; a broken property raises `Violation`, which then
carries the script and the story. `finish` ends every run: the store answers again, the engine must go idle, and what
must be true of an idle engine is checked.
"""

import itertools
import signal
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.v1.request import RequestStatus

from kvledger_conformance.engine import compat, oracle
from kvledger_conformance.engine.engine import Engine, ForwardFailedError
from kvledger_conformance.engine.watch import settle
from kvledger_conformance.store.transfer import Fault
from kvledger_conformance.store.world import World
from kvledger_conformance.suite import targets
from kvledger_conformance.suite.properties import Impossible, Violation, require

IDLE_STEPS = 40
"""Steps in a row that schedule nothing before an engine whose store answers counts as stuck; the quarantine of the
kvledger target (20 steps) fits in."""
STARVE_STEPS = 12
"""Steps for which running requests find no block; longer than a connector may ask core to wait (8 for kvledger)."""
MOST_STEPS = 200
"""Steps within which everything must be over."""
LATE_STEPS = 8
"""Steps after which a late copy ends by itself: connectors may rely on a bound."""
MAX_LOADS = 3
"""Loads of one request that may fail before it must be computed instead."""
SILENT_STEPS = 60
"""Steps within which requests must finish although the store says nothing."""
HANG_S = 6.0
"""Seconds after which a call into the connector counts as never returning."""
LOOK_S = 0.5
STANDARD_LIBRARY = sysconfig.get_path("stdlib")

Script = list[dict[str, Any]]


class Driver:
    """One engine under one script. Use through `driving` or `replay`."""

    def __init__(self, engine: Engine, holds: tuple[str, ...]) -> None:
        self.engine = engine
        self._holds = holds
        self.world = engine.world
        self.script: Script = []
        self._story: list[str] = []
        engine.note = self.note
        self._failing_loads = False
        self.dead = False

    # -- recording ---------------------------------------------------------

    def do(self, action: str, **arguments: Any) -> None:
        """Perform an action by name. Raises Impossible, Violation."""
        require(not self.dead or action == "finish", "the engine is dead")
        method: Callable[..., None] = getattr(self, "do_" + action)
        self.script.append({"do": action, **arguments})
        shown = ", ".join(f"{k}={v}" for k, v in arguments.items())
        self._story.append(f"{len(self.script):>3}  {action}" + (f"({shown})" if shown else ""))
        before = self._transfers()
        try:
            self._guarded(method, arguments)
        except Violation as violation:
            self._tell_transfers(before)
            violation.script, violation.story = list(self.script), self.story(violation)
            violation.shape = self.engine.shape
            raise
        except Impossible:
            self.script.pop()
            self._story.pop()
            raise
        self._tell_transfers(before)

    def run(self, script: Script) -> None:
        """Perform the actions of a script; see `do`."""
        for action in script:
            self.do(action["do"], **{k: v for k, v in action.items() if k != "do"})

    def _guarded(self, method: Callable[..., None], arguments: dict[str, Any]) -> None:
        try:
            with bounded(HANG_S):
                method(**arguments)
                settle()
                self.engine.check()
        except (Violation, Impossible):
            raise
        except HangError as error:
            where = _where(error, "site-packages", "kvledger/")
            raise Violation("engine-alive", f"a hook has not returned for {HANG_S:g} s: {where}") from None
        except Exception as error:
            if self.engine.found:
                raise self.engine.found[0] from error
            what = f"{type(error).__name__}: {str(error)[:200]} ({_where(error)})"
            raise Violation("engine-alive", what) from error

    def note(self, text: str) -> None:
        """A line of the story."""
        self._story.append("       " + text)

    def story(self, violation: Violation | None = None) -> str:
        """The run so far, in words."""
        lines = _folded(self._story)
        if violation is not None:
            lines.append(f"  => {violation}")
        return "\n".join(lines)

    def _transfers(self) -> dict[int, str]:
        return {t.number: _state(t) for t in self.world.transfers}

    def _tell_transfers(self, before: dict[int, str]) -> None:
        for transfer in self.world.transfers:
            state = _state(transfer)
            if before.get(transfer.number) == state or transfer.client == "lookup":
                continue
            blocks = sorted(transfer.notes.get("blocks", ()))
            where = f" blocks {blocks}" if blocks else ""
            fault = f" [{transfer.fault}]" if transfer.fault and transfer.number not in before else ""
            self.note(f"{transfer.client}: {transfer.operation} #{transfer.serial}{where} {state}{fault}")

    # -- requests ----------------------------------------------------------

    def do_add(self, name: str, blocks: str, tail: int, tokens: int, stop: int = 0) -> None:
        """A request arrives: `blocks` full blocks of prompt by letter, `tail` tokens more, `tokens` to generate; with
        `stop`, the token that comes as that one ends it."""
        prompt = oracle.prompt_tokens(blocks, tail, self.engine.shape.block_size)
        require(0 < len(prompt) <= self.engine.shape.max_model_len - tokens, "a prompt of no length, or too long")
        self.engine.add(name, prompt, tokens, stop)

    def do_abort(self, name: str, during: bool = False) -> None:
        """The user gives up: between two steps, or while the next one runs (core hears of it before its output)."""
        require(
            name in self.engine.scheduler.requests and not self.engine.requests[name].is_finished(),
            f"{name} is not there",
        )
        require(name not in self.engine.aborting, f"{name} is given up already")
        if during:
            self.engine.aborting.append(name)
        else:
            self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- time --------------------------------------------------------------

    def do_step(self, pace: str = "late", lag: str = "gpu") -> None:
        """One engine step; an idle engine does not step."""
        require(self.engine.busy, "the engine is idle")
        self.engine.step(pace=pace, lag=lag)
        for transfer in self.world.late():
            transfer.late_steps += 1
            if transfer.late_steps >= LATE_STEPS:
                self.world.land()
                break
        self._check_loads()

    def do_crash(self) -> None:
        """A step whose forward raises: vLLM runs the collecting hooks all the same, then the engine is dead."""
        require(self.engine.scheduler.has_requests(), "the engine is idle")
        try:
            self.engine.step(fail_forward=True, lag="none")
        except ForwardFailedError:
            self.note("the forward raised; the engine process ends soon")
        self.dead = True
        self.world.pause(False)
        self.world.release()

    def do_steps(self, count: int) -> None:
        """Several steps, as long as there is work."""
        for _ in range(count):
            if not self.engine.busy:
                return
            self.do_step()

    def do_preempt(self) -> None:
        """The next steps find no free block for running requests, until vLLM preempts one by its own rules."""
        require(self.engine.scheduler.running and not self.engine.starve, "nothing runs")
        self.engine.starve = STARVE_STEPS

    def do_until_preempted(self) -> None:
        """Steps until core has preempted a request, as `preempt` made it want to."""
        for _ in range(STARVE_STEPS):
            before = self.engine.preemptions_now()
            self.do_step()
            if self.engine.preemptions_now() > before:
                return

    def do_forget(self) -> None:
        """Other traffic uses every free block once: the local cache forgets them, their bytes change."""
        self.engine.catch_up()  # other traffic's forwards run behind those that are launched
        pool = self.engine.pool
        free = pool.get_num_free_blocks()
        require(free, "no free block")
        self.engine.borrowed = True
        blocks = pool.get_new_blocks(free)
        self.engine.check()
        for rank in self.engine.ranks:
            rank.spoil([b.block_id for b in blocks])
        pool.free_blocks(blocks)
        self.engine.borrowed = False

    def do_reset(self, running: bool = False, connector: bool = False) -> None:
        """`reset_prefix_cache`. With `running`, running requests are preempted and may resume in the next schedule."""
        require(not _loading(self.engine.scheduler.requests.values()), "core cannot reset while loads are out")
        self._reset(running, connector)

    def _reset(self, running: bool, connector: bool) -> bool:
        try:
            done = self.engine.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            self.note("core refuses: some block is still referenced (a limit of core, not counted)")
            return False
        self.engine.reset_seen = self.engine.reset_seen or connector
        self.note(f"reset: {done}")
        return bool(done)

    def do_new_weights(self) -> None:
        """Idle engine: caches and connector are reset and the weights change, as reinforcement learning does."""
        require(not self.engine.busy, "only between requests")
        if self._reset(running=True, connector=True):
            self.engine.weights += 1

    # -- the store ---------------------------------------------------------

    def do_hold(self, rank: int, operation: str, phase: str = "before") -> None:
        """Calls of this rank wait at a gate."""
        held = (f"rank{rank}", operation, phase) in self.world.gates
        require(rank < self.engine.shape.ranks and not held, "held already")
        require(operation in self._holds, "this connector waits for such calls inside a hook")
        self.world.hold(f"rank{rank}", operation, phase)

    def do_open(self, rank: int | None = None, operation: str | None = None) -> None:
        """Open gates: of one rank, one operation, or all."""
        client = None if rank is None else f"rank{rank}"
        require(any(client in (None, g[0]) and operation in (None, g[1]) for g in self.world.gates), "nothing is held")
        self.world.release(client, operation)

    def do_fault(
        self,
        operation: str,
        kind: str,
        rank: int | None = None,
        code: int = -1,
        position: int | None = None,
        times: int | None = 1,
    ) -> None:
        """The next calls of an operation go wrong; see `transfer.Fault`."""
        require(len(self.world.faults) < 3, "enough faults")
        positions = None if position is None else (position,)
        client = None if rank is None else f"rank{rank}"
        self._failing_loads = self._failing_loads or operation == "get"
        self.world.add_fault(
            Fault(operation=operation, kind=kind, client=client, code=code, positions=positions, times=times)
        )

    def do_heal(self) -> None:
        """Faults are over."""
        require(self.world.faults, "no fault")
        self.world.clear_faults()

    def do_evict(self, index: int, all_ranks: bool = False) -> None:
        """The store drops an object: of one rank, or of all."""
        keys = sorted(self.world.objects)
        require(keys, "nothing is stored")
        key = keys[index % len(keys)]
        name = next((h.hex() for h in self.engine.names if h.hex() in key), key)
        gone = [k for k in keys if name in k] if all_ranks else [key]
        self.note(f"evicted {self.world.evict(gone)} object(s)")

    def do_land(self) -> None:
        """Copies that outlived their calls end now."""
        require(self.world.land(), "nothing is late")

    # -- the end -----------------------------------------------------------

    def do_silent(self) -> None:
        """The store goes silent for transfers; what needs no store must go on."""
        for rank in self.engine.ranks:
            self.world.hold(f"rank{rank.index}", "put", "before")
        waiting = [r for r in self.engine.scheduler.requests.values() if not r.is_finished()]
        require(waiting and not _loading(waiting), "nobody waits for computing only")
        for _ in range(SILENT_STEPS):
            if all(r.is_finished() for r in waiting):
                return
            self.engine.step()
            require(not _loading(waiting), "a load began")
        left = [r.request_id for r in waiting if not r.is_finished()]
        self.engine.breach("bounded-pins", f"{left} did not finish in {SILENT_STEPS} steps of a silent store")

    def do_finish(self) -> None:
        """The store answers again; the engine goes idle; then everything must be right."""
        self.world.release()
        self.world.clear_faults()
        self.engine.starve = 0
        settle()
        self.world.land()  # also of a call that was held until now
        settle()
        self.engine.check()
        if self.dead:
            return
        nothing = 0
        for _ in range(MOST_STEPS):
            if nothing > IDLE_STEPS or not self.engine.busy:
                break
            output = self.engine.step()
            nothing = 0 if output is None or output.num_scheduled_tokens else nothing + 1
            self._check_loads()
        if self.engine.busy:
            what = f"the store answers, and the engine still steps after {nothing} steps with nothing to compute: "
            self.engine.breach("goes-idle", what + self._what_is_left())
            return
        self._check_idle()

    def _what_is_left(self) -> str:
        requests = self.engine.scheduler.requests.values()
        left = ", ".join(f"{r.request_id} {r.status.name}" for r in requests)
        return left or "no request, but the connector has work pending"

    def _check_idle(self) -> None:
        held = {b.block_id: b.ref_cnt for b in self.engine.pool.blocks if b.ref_cnt and not b.is_null}
        if held:
            self.engine.breach("goes-idle", f"the engine is idle while references are held: {held}")
        lost = [r for r, w in self.engine.loads.items() if w.waiting]
        if lost:
            self.engine.breach("one-completion-per-load", f"loads never reported: {lost}")
        for name, request in self.engine.all_requests():
            self._check_output(name, request)

    def _check_output(self, name: str, request: Any) -> None:
        got = list(request.output_token_ids)
        weights = self.engine.weights_of[id(request)]
        right = oracle.right_output(list(request.prompt_token_ids), len(got), weights)
        complete = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        stops = [i for i, token in enumerate(got, 1) if token in (request.sampling_params.stop_token_ids or ())]
        ended = len(got) == request.max_tokens or stops == [len(got)]
        if got != right or (not complete and not ended):
            self.engine.breach("outputs-right", f"{name} got {got}, right is {right}")

    def _check_loads(self) -> None:
        for name, request in self.engine.all_requests():
            loads = self.engine.attempts.get(id(request), 0)
            if self._failing_loads and loads > MAX_LOADS + request.num_preemptions:
                what = f"{name} has begun {loads} loads, and none has succeeded"
                self.engine.breach("bounded-retries", what)


def _loading(requests: Iterable[Any]) -> bool:
    return any(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in requests)


def _folded(lines: list[str]) -> list[str]:
    """Equal lines in a row told once."""
    out: list[str] = []
    for line, run in itertools.groupby(lines):
        count = len(list(run))
        out.append(line if count == 1 else f"{line}   (x{count})")
    return out


class HangError(BaseException):
    """A hook took too long; raised in the main thread by the alarm. Not an Exception: no connector may swallow it."""


OURS = ("/kvledger_conformance/", "/vllm/v1/", "/hypothesis/", "/importlib/", "<frozen ")
"""Code that calls hooks. A busy machine makes all of it slow; only a call into the connector that stays is a hang."""


def _hook_in(frame: Any) -> Any:
    """The hook that the main thread is in: the outermost frame behind the engine's that is not code that calls hooks."""
    inside = False
    for one in reversed([f for f, _ in traceback.walk_stack(frame)]):
        file = one.f_code.co_filename
        inside = inside or file == Engine.step.__code__.co_filename
        if inside and not any(part in file for part in OURS) and not file.startswith(STANDARD_LIBRARY):
            return one
    return None


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise HangError in this (the main) thread if one call into the connector takes longer."""
    seen: list[tuple[Any, float]] = []

    def ring(_signal: int, frame: Any) -> None:
        hook, now = _hook_in(frame), time.monotonic()
        if hook is None or not seen or seen[0][0] is not hook:
            seen[:] = [] if hook is None else [(hook, now)]
        elif now - seen[0][1] >= seconds:
            raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        seen.clear()


def _where(error: BaseException, *parts: str) -> str:
    """The innermost frame in which the error was raised, of files with one of these in their name."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not parts or any(p in f.filename for p in parts)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"


def _state(transfer: Any) -> str:
    if transfer.at is not None:
        return f"held {transfer.at}"
    if transfer.late:
        return "gave up, bytes still move"
    return "runs" if transfer.in_call else "is over"


@contextmanager
def driving(target: targets.Target, shape: compat.Shape, past: frozenset[str] = frozenset()) -> Iterator[Driver]:
    """A driver on a fresh engine and an empty store. `past`: properties whose breach is noted and passed by."""
    with targets.running(target, shape, World()) as engine:
        engine.past = past
        yield Driver(engine, target.holds)


def replay(
    target: targets.Target,
    shape: compat.Shape,
    script: Script,
    *,
    past: frozenset[str] = frozenset(),
) -> Violation | None:
    """Perform a script and finish. The violation it leads to, or None. Raises Impossible if a step does not exist."""
    with driving(target, shape, past) as driver:
        try:
            driver.run(script)
            if not script or script[-1]["do"] != "finish":
                driver.do("finish")
        except Violation as violation:
            return violation
    return None
