"""Numbers: sums, differences, comparisons."""

from conformance.proof.logic import truth
from conformance.proof.syntax import Apply
from conformance.proof.translate import Scope, Translator, rule
from conformance.proof.values import INTEGER, Scalar, Value


@rule("+", "-", "*")
def _arithmetic(t: Translator, e: Apply, s: Scope) -> Value:
    a, b = (t.number(arg, s) for arg in e.args)
    return Scalar(INTEGER, a + b if e.name == "+" else a - b if e.name == "-" else a * b)


@rule("<", ">", "\\leq", "\\geq", "<=", ">=", "=<")
def _compare(t: Translator, e: Apply, s: Scope) -> Value:
    a, b = (t.number(arg, s) for arg in e.args)
    match e.name:
        case "<":
            return truth(a < b)
        case ">":
            return truth(a > b)
        case "\\geq" | ">=":
            return truth(a >= b)
    return truth(a <= b)
