"""The episodes that a simulation plays: lengths of prompts, turns and observations, and seconds of tools.

Episode number n is drawn from a random generator of its own, which depends only on the seed and n. All splits
of a plan, and the colocated run, therefore play the same episodes.
"""

import math
import random
from dataclasses import dataclass

P99 = 2.3263478740408408  # 99 % of a standard normal distribution lies below it


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution, given by its median and its 99 % quantile, and cut at `most`.

    Example: LogNormal(0.2, 4.0) is 0.2 s or less half of the time, and above 4 s once in 100 draws.
    LogNormal(5, 5) is always 5.
    """

    median: float  # > 0
    p99: float  # >= median
    most: float = math.inf

    def draw(self, chance: random.Random) -> float:
        sigma = math.log(self.p99 / self.median) / P99
        return min(self.most, self.median * math.exp(sigma * chance.gauss(0.0, 1.0)))


@dataclass(frozen=True)
class Sizes:
    """Tokens of an episode: of each turn, the tokens that the engine reads before it and those it generates.

    Example: Sizes(((100, 20), (50, 30))) is a prompt of 100 tokens, a turn of 20, an observation of 50 and a
    turn of 30; 200 tokens.
    """

    turns: tuple[tuple[int, int], ...]  # (read, generated >= 1), at least one; the prompt is not empty

    @property
    def tokens(self) -> int:
        return sum(read + generated for read, generated in self.turns)


@dataclass(frozen=True)
class DrawnLengths:
    """Lengths whose parts are drawn independently. An episode ends when its context is full."""

    prompt: LogNormal
    turns: LogNormal  # number of turns
    turn: LogNormal  # tokens
    observation: LogNormal  # tokens
    context: int  # most tokens of an episode

    def draw(self, chance: random.Random) -> Sizes:
        left, turns = self.context, []
        read = min(_count(self.prompt, chance), left - 1)
        for _ in range(_count(self.turns, chance)):
            generated = min(_count(self.turn, chance), left - read)
            turns.append((read, generated))
            left -= read + generated
            read = _count(self.observation, chance)
            if read >= left:  # no room for an answer
                break
        return Sizes(tuple(turns))


@dataclass(frozen=True)
class RecordedLengths:
    """The lengths of recorded episodes, each of them equally likely."""

    records: tuple[Sizes, ...]

    def draw(self, chance: random.Random) -> Sizes:
        return self.records[int(chance.random() * len(self.records))]


@dataclass(frozen=True)
class ToolTimes:
    """Seconds of the calls of an environment, after every turn but the last. None: no time."""

    between: LogNormal | None = None
    at_once: int = 64  # calls in progress at a time, per replica (environment.concurrency)


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode that is going to be played."""

    sizes: Sizes
    waits: tuple[float, ...]  # seconds of the call after each turn but the last


@dataclass(frozen=True)
class Workload:
    """Episodes that are drawn."""

    lengths: DrawnLengths | RecordedLengths
    tools: ToolTimes
    seed: int = 0

    def episode(self, number: int) -> PlannedEpisode:
        """Return episode `number`, counted from 0 in order of admission."""
        chance = random.Random(f"{self.seed}/{number}")
        sizes, between = self.lengths.draw(chance), self.tools.between
        waits = (0.0 if between is None else between.draw(chance) for _ in sizes.turns[1:])
        return PlannedEpisode(sizes, tuple(waits))


def _count(spread: LogNormal, chance: random.Random) -> int:
    return max(1, round(spread.draw(chance)))
