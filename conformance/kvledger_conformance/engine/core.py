"""vLLM's own engine loop with two steps in flight, around the harness's ranks.

`AsyncCore` is vLLM's `EngineCore` without processes, model and front end: `step_with_batch_queue`, `AsyncScheduler` and
the order of aborts are its own code. `Workers` takes the place of the executor; when the hooks of a step run on which
rank, and when its forward writes, is the harness's choice.
"""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore


class Workers:
    """The executor's face: steps are handed out at once, their results are waited for."""

    def __init__(self, launch: Callable[[Any], Callable[[], Any]]) -> None:
        self._launch = launch
        self._waiting: SimpleNamespace | None = None
        """The future of a step: its `result` is made when somebody waits for it."""

    def execute_model(self, scheduler_output: Any, *, non_block: bool) -> SimpleNamespace:
        """A step is sent to the ranks. With tokens to sample, vLLM waits for `sample_tokens` instead."""
        del non_block
        self._waiting = SimpleNamespace(result=self._launch(scheduler_output))
        return self._waiting

    def sample_tokens(self, _grammar_output: Any, *, non_block: bool) -> SimpleNamespace:
        """The sampled tokens of the step just sent."""
        del non_block
        if self._waiting is None:
            raise RuntimeError("sample_tokens without a step")
        return self._waiting


class AsyncCore(EngineCore):
    """EngineCore with what `step_with_batch_queue` needs, and nothing else."""

    def __init__(self, config: Any, scheduler: Any, workers: Workers) -> None:
        # not EngineCore.__init__: it starts an executor and loads a model
        self.vllm_config = config
        self.scheduler = scheduler
        self.model_executor = workers
        self.batch_queue_size = config.max_concurrent_batches
        self.batch_queue: deque[Any] = deque(maxlen=self.batch_queue_size)
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.is_mm_encoder_only = False
        self.is_pooling_model = False
        self.check_for_draft_tokens = False
        self.async_scheduling = True
        self.log_stats = False
        self._weight_version = "default"

    def log_error_detail(self, scheduler_output: Any) -> Any:
        """vLLM dumps its configuration to the log here."""
        del scheduler_output
        return contextlib.nullcontext()
