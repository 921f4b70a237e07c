"""How long the end of a side may take: vLLM kills a process that is not gone within its grace."""

import os

GRACE_VARIABLE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
GRACE_S = 5.0
"""vLLM's default (0.32), for workers and for the process of EngineCore."""
MARGIN_S = 1.0
"""For all that vLLM itself does meanwhile."""
LEAST_S = 0.2
SIDES = 2
"""With one rank, both sides end in the same process, one after the other."""


def shutdown_budget_s(setting_s: float) -> float:
    """Longest wait of one side at its end (s): `shutdown_timeout_s`, or a side's share of vLLM's grace if that is less.

    What comes on top is bounded: closing a client that is idle takes Mooncake 1 to 2 s, and one that is not is left open.
    """
    text = os.environ.get(GRACE_VARIABLE, "")
    grace_s = float(text) if text.isdecimal() else GRACE_S  # vLLM itself refuses anything else
    return min(setting_s, max(LEAST_S, (grace_s - MARGIN_S) / SIDES))
