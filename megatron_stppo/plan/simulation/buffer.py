"""Which episodes are admitted, and which make the next batch: the rules of the section `serving`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from megatron_stppo.plan.simulation.replica import EpisodeInPlay

Order = Literal["admission", "completion"]


@dataclass(frozen=True)
class BatchRule:
    """How many episodes are admitted, and which of them make a batch.

    Example: with batches of 4 tasks of 2 episodes and a bound of 1, 16 episodes are admitted in iteration 0
    and 24 in iteration 1.
    """

    tasks: int  # of a batch
    staleness: int  # serving.max_staleness
    order: Order = "admission"
    samples: int = 1  # episodes of a task; a task is complete when all of them are

    def admitted(self, version: int) -> int:
        """Return the number of episodes that may be admitted before iteration `version` + 1 begins."""
        return (self.staleness + version + 1) * self.tasks * self.samples


class EpisodeBuffer:
    """The episodes that were admitted and not yet trained on."""

    def __init__(self, rule: BatchRule) -> None:
        self.admitted = 0  # episodes so far
        self.open: dict[int, list[EpisodeInPlay]] = {}  # by task, in order of admission
        self._rule = rule
        self._left: dict[int, int] = {}  # by task: episodes that are not complete
        self._done: dict[int, None] = {}  # complete tasks, in order of completion

    def may_admit(self, version: int) -> bool:
        return self.admitted < self._rule.admitted(version)

    def admit(self, episode: EpisodeInPlay) -> None:
        """Note that an episode begins. Episodes begin in the order of their numbers."""
        assert episode.number == self.admitted
        self.admitted += 1
        task = episode.number // self._rule.samples
        self.open.setdefault(task, []).append(episode)
        self._left.setdefault(task, self._rule.samples)

    def add(self, episode: EpisodeInPlay) -> None:
        """Note that an episode is complete."""
        task = episode.number // self._rule.samples
        self._left[task] -= 1
        if not self._left[task]:
            self._done[task] = None

    def take(self) -> list[EpisodeInPlay]:
        """Remove and return the next batch, or return an empty list if it is not complete yet.

        A batch consists of the tasks that were admitted first, or of those that were completed first.
        """
        in_order = self.open if self._rule.order == "admission" else self._done
        chosen = list(itertools.islice(in_order, self._rule.tasks))
        if len(chosen) < self._rule.tasks or any(task not in self._done for task in chosen):
            return []
        for task in chosen:
            del self._done[task], self._left[task]
        return [one for task in chosen for one in self.open.pop(task)]
