"""Checks proofs: every obligation by the solvers, whether any step is possible at all, and what breaks an obligation that fails."""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import z3

from conformance.proof import instance, solvers
from conformance.proof.instance import Counterexample
from conformance.proof.obligations import Part, Proof, Prover
from conformance.proof.syntax import Module
from conformance.proof.world import Arbitrary

SIZES = (1, 2, 3)
"""The finite instances in which a counterexample, or a possible step, is looked for."""


@dataclass(slots=True)
class Result:
    """What became of one obligation."""

    goal: str
    place: str
    seconds: float = 0.0
    proved: dict[str, bool] = field(default_factory=dict)
    """By solver."""
    counterexample: Counterexample | None = None


@dataclass(slots=True)
class Report:
    """What became of one part's obligations."""

    module: str
    part: str
    possible: bool
    """Whether a finite instance has a state or step that satisfies the hypotheses: if none has, they prove nothing."""
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [r for r in self.results if not all(r.proved.values())]

    @property
    def ok(self) -> bool:
        return self.possible and not self.failed


@dataclass(frozen=True, slots=True)
class Options:
    """Which solvers are asked, and whether all obligations are also checked in finite instances of this many members per set."""

    solvers: tuple[str, ...] = ("z3",)
    finite: tuple[int, ...] = ()


def check_part(prover: Prover, part: Part, options: Options) -> Report:
    """Check the obligations of one part."""
    world = Arbitrary(prover.names)
    made = prover.obligations(part, world)
    axioms = world.axioms()
    report = Report(prover.module.name, part.name, any(instance.example(prover, part, size) for size in SIZES))
    for index, goal in enumerate(made.goals):
        result = Result(goal.name, str(goal.place))
        started = time.monotonic()
        for name in options.solvers:
            result.proved[name] = solvers.SOLVERS[name](axioms, goal.hypotheses, goal.formula)
        result.seconds = time.monotonic() - started
        sizes = SIZES if not any(result.proved.values()) else ()
        for size in sorted({*sizes, *options.finite}):
            result.counterexample = result.counterexample or instance.counterexample(prover, part, index, size)
        if options.finite:
            result.proved["finite"] = result.counterexample is None
        report.results.append(result)
    return report


@dataclass(frozen=True, slots=True)
class _Task:
    module: Module
    proof: Proof
    part: int
    options: Options


def _run(task: _Task) -> Report:
    z3.set_param("memory_max_size", 4096)
    prover = Prover(task.module, task.proof)
    return check_part(prover, prover.parts()[task.part], task.options)


def check(proof: Proof, module: Module, options: Options, jobs: int) -> Iterator[Report]:
    """Check a proof of a parsed module, parts in parallel; the reports in the order of the parts.

    Raises:
        Refused: the module has what is not understood, or an action leaves a variable open.
    """
    parts = Prover(module, proof).parts()
    tasks = [_Task(module, proof, i, options) for i in range(len(parts))]
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_run, tasks)
