"""Which episodes are admitted, and which make the next batch: the rules of the section `serving`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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

    @property
    def batch(self) -> int:
        """Episodes of a batch."""
        return self.tasks * self.samples

    def admitted(self, version: int) -> int:
        """Return the number of episodes that may be admitted before iteration `version` + 1 begins."""
        return (self.staleness + version + 1) * self.batch


class EpisodeBuffer:
    """The episodes that were admitted and not yet trained on."""

    def __init__(self, rule: BatchRule) -> None:
        self.admitted = 0  # episodes so far
        self.complete = 0  # episodes that are complete and wait for their batch
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
        self.open.setdefault(episode.number // self._rule.samples, []).append(episode)
        self._left.setdefault(episode.number // self._rule.samples, self._rule.samples)

    def add(self, episode: EpisodeInPlay) -> None:
        """Note that an episode is complete."""
        task = episode.number // self._rule.samples
        self.complete += 1
        self._left[task] -= 1
        if not self._left[task]:
            self._done[task] = None

    def take(self) -> list[EpisodeInPlay]:
        """Remove and return the next batch, or return an empty list if it is not complete yet."""
        if len(self._done) < self._rule.tasks:
            return []
        # a batch is complete if these are: the tasks admitted first, or those completed first
        chosen = list(itertools.islice(CANDIDATES[self._rule.order](self), self._rule.tasks))
        if any(self._left[task] for task in chosen):
            return []
        batch = [one for task in chosen for one in self.open.pop(task)]
        for task in chosen:
            del self._done[task], self._left[task]
        self.complete -= len(batch)
        return batch

    def by_admission(self) -> Iterator[int]:
        return iter(self.open)

    def by_completion(self) -> Iterator[int]:
        return iter(self._done)


CANDIDATES: dict[Order, Callable[[EpisodeBuffer], Iterator[int]]] = {
    "admission": EpisodeBuffer.by_admission,
    "completion": EpisodeBuffer.by_completion,
}
