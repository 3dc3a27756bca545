"""Which episodes are admitted, and which make the next batch: the rules of the section `serving`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_stppo.plan.simulation.replica import EpisodeInPlay

Order = Literal["admission", "completion"]


@dataclass(frozen=True)
class BatchRule:
    """How many episodes are admitted, and which of them make a batch.

    Example: with batches of 4 and a bound of 1, 8 episodes are admitted in iteration 0 and 12 in iteration 1.
    """

    batch: int  # episodes
    staleness: int  # serving.max_staleness
    order: Order = "admission"

    def admitted(self, version: int) -> int:
        """Return the number of episodes that may be admitted before iteration `version` + 1 begins."""
        return (self.staleness + version + 1) * self.batch


class EpisodeBuffer:
    """The episodes that were admitted and not yet trained on."""

    def __init__(self, rule: BatchRule) -> None:
        self.admitted = 0  # episodes so far
        self._rule = rule
        self.open: dict[int, EpisodeInPlay] = {}  # by number, in order of admission
        self._complete: dict[int, EpisodeInPlay] = {}  # those that are complete, in order of completion
        self._choose = {"admission": self._first_admitted, "completion": self._first_completed}[rule.order]

    @property
    def complete(self) -> int:
        """The number of complete episodes that wait for their batch."""
        return len(self._complete)

    def may_admit(self, version: int) -> bool:
        return self.admitted < self._rule.admitted(version)

    def admit(self, episode: EpisodeInPlay) -> None:
        assert episode.number == self.admitted
        self.open[episode.number] = episode
        self.admitted += 1

    def add(self, episode: EpisodeInPlay) -> None:
        """Note that an episode is complete."""
        self._complete[episode.number] = episode

    def take(self, version: int) -> list[EpisodeInPlay]:
        """Remove and return batch `version`, or return an empty list if it is not complete yet."""
        if len(self._complete) < self._rule.batch:
            return []
        batch = self._choose(version)
        if len(batch) < self._rule.batch or not all(one.complete for one in batch):
            return []
        for one in batch:
            del self.open[one.number], self._complete[one.number]
        return batch

    def _first_admitted(self, version: int) -> list[EpisodeInPlay]:
        return [one for one, _ in zip(self.open.values(), range(self._rule.batch), strict=False)]

    def _first_completed(self, version: int) -> list[EpisodeInPlay]:
        """Return those that would be too old for the next batch, and then those that were completed first."""
        last = version - self._rule.staleness
        due = [one for one in self.open.values() if one.admitted <= last]
        assert len(due) <= self._rule.batch, (len(due), version)
        others = (one for one in self._complete.values() if one.admitted > last)
        return due + [one for one, _ in zip(others, range(self._rule.batch - len(due)), strict=False)]
