"""The limit on how often a failed engine is replaced, and detection of failures that a new engine repeats."""

from __future__ import annotations

import logging

from megatron_stppo.base.errors import DoNotRestart, EngineLost
from megatron_stppo.rollout.vllm.generation import EngineFailure

log = logging.getLogger(__name__)


class Restarts:
    """Count of the engine restarts of a run.

    in_process: whether a new engine can be built in this process. On a GPU it cannot: vLLM refuses to start
    unless gpu_memory_utilization of the GPU is free, which the trainer occupies, and after an illegal
    address no call of CUDA in this process succeeds.
    The state is equal on all ranks, because an EngineFailure is raised on all ranks.
    Example: with budget=1 the first failure is counted; the next one is raised.
    """

    def __init__(self, budget: int, *, in_process: bool = True) -> None:
        self._budget, self._in_process, self.count = budget, in_process, 0
        self._last: tuple[int, str] | None = None

    def passed(self) -> None:
        """Record that a rollout succeeded, and forget the last failure.

        Evaluations use the same seed again, so a later failure at the same place is not a repetition.
        """
        self._last = None

    def admit(self, failure: EngineFailure, seed: int) -> None:
        """Count a failure of the rollout with this seed. If this returns, the caller builds a new engine.

        Raises DoNotRestart if the same failure occurs again at the same place of the same rollout, because it
        would occur in a new process too. Raises `failure` itself when the budget is spent, and EngineLost if
        the new engine needs a new process.
        """
        place = (seed, failure.place)
        if place == self._last:
            raise DoNotRestart(f"a new engine failed at the same place: {failure}") from failure
        if self.count >= self._budget:
            raise failure
        if not self._in_process:
            raise EngineLost(str(failure)) from failure
        self._last, self.count = place, self.count + 1
        log.error("engine restart %d of at most %d: %s", self.count, self._budget, failure)
