"""The two solvers, each asked whether hypotheses imply a goal.

z3's limit is in steps, so that its answer does not depend on the machine.
"""

from collections.abc import Mapping, Sequence

import cvc5
import z3

Z3_STEPS = 20_000_000
"""The most that z3 does for one query and seed, in its own units (`rlimit`): some seconds."""
CVC5_MS = 10_000
CVC5_WAYS = ({"user-pat": "use"}, {"full-saturate-quant": "true"})
"""Options to try one after the other: instances by the triggers that are given; then also by what occurs."""
SEEDS = (0, 1)


def query(axioms: Sequence[z3.BoolRef], hypotheses: Sequence[z3.BoolRef], goal: z3.BoolRef, seed: int = 0) -> z3.Solver:
    """The hypotheses and the negation of the goal: unsatisfiable if the goal follows."""
    solver = z3.SimpleSolver()
    solver.set("rlimit", Z3_STEPS)
    solver.set("smt.mbqi", False)
    solver.set("auto_config", False)
    solver.set("smt.random_seed", seed)
    solver.add(*axioms, *hypotheses, z3.Not(goal))
    return solver


def by_z3(axioms: Sequence[z3.BoolRef], hypotheses: Sequence[z3.BoolRef], goal: z3.BoolRef) -> bool:
    """Whether z3 finds that the goal follows."""
    return any(query(axioms, hypotheses, goal, seed).check() == z3.unsat for seed in SEEDS)


def by_cvc5(axioms: Sequence[z3.BoolRef], hypotheses: Sequence[z3.BoolRef], goal: z3.BoolRef) -> bool:
    """Whether cvc5 finds that the goal follows; the query goes as text."""
    text = f"(set-logic ALL)\n{query(axioms, hypotheses, goal).to_smt2()}"
    return any("unsat" in _cvc5(text, way) for way in CVC5_WAYS)


def _cvc5(text: str, way: Mapping[str, str]) -> list[str]:
    """What cvc5 answers to a script."""
    manager = cvc5.TermManager()
    solver = cvc5.Solver(manager)
    for option, value in {"tlimit-per": str(CVC5_MS), "fresh-binders": "true", **way}.items():
        solver.setOption(option, value)
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "query")
    symbols = parser.getSymbolManager()
    answers = []
    while not (command := parser.nextCommand()).isNull():
        answers.append(str(command.invoke(solver, symbols)).strip())
    return answers


SOLVERS = {"z3": by_z3, "cvc5": by_cvc5}
