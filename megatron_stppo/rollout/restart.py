"""How often a failed engine is replaced by a new one, and when that is pointless."""

from __future__ import annotations

import logging

from megatron_stppo.resilience.faults import DoNotRestart
from megatron_stppo.rollout.generation import EngineFailure

log = logging.getLogger(__name__)


class Restarts:
    """Counts the restarts of a run. Equal on all ranks, because an EngineFailure is.

    Example: with budget=1 the first failure is counted; the next one is raised.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self.count = budget, 0
        self._last: tuple[int, str] | None = None

    def passed(self) -> None:
        """A rollout has ended well: its seed may be played again, as evaluations do."""
        self._last = None

    def admit(self, failure: EngineFailure, seed: int) -> None:
        """Counts a failure of the rollout with this seed, after which a new engine is to be built.

        Raises DoNotRestart for the same failure at the same place of the same rollout, which a new process
        would meet again; `failure` itself when the budget is spent.
        """
        mesh = (seed, failure.mesh)
        if mesh == self._last:
            raise DoNotRestart(f"a new engine failed at the same place: {failure}") from failure
        if self.count >= self._budget:
            raise failure
        self._last, self.count = mesh, self.count + 1
        log.error("engine restart %d of at most %d: %s", self.count, self._budget, failure)
