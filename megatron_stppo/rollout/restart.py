"""The limit on how often a failed engine is replaced, and detection of failures that a new engine repeats."""

from __future__ import annotations

import logging

from megatron_stppo.resilience.faults import DoNotRestart
from megatron_stppo.rollout.generation import EngineFailure

log = logging.getLogger(__name__)


class Restarts:
    """Count of the engine restarts of a run.

    The state is equal on all ranks, because an EngineFailure is raised on all ranks.
    Example: with budget=1 the first failure is counted; the next one is raised.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self.count = budget, 0
        self._last: tuple[int, str] | None = None

    def passed(self) -> None:
        """Record that a rollout succeeded, and forget the last failure.

        Evaluations use the same seed again, so a later failure at the same place is not a repetition.
        """
        self._last = None

    def admit(self, failure: EngineFailure, seed: int) -> None:
        """Count a failure of the rollout with this seed. If this returns, the caller builds a new engine.

        Raises DoNotRestart if the same failure occurs again at the same place of the same rollout, because it
        would occur in a new process too. Raises `failure` itself when the budget is spent.
        """
        place = (seed, failure.place)
        if place == self._last:
            raise DoNotRestart(f"a new engine failed at the same place: {failure}") from failure
        if self.count >= self._budget:
            raise failure
        self._last, self.count = place, self.count + 1
        log.error("engine restart %d of at most %d: %s", self.count, self._budget, failure)
