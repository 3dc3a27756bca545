"""The lengths of the episodes that are trained on, when the longer ones finish later, some much later.

In order of admission they are the lengths that were drawn. In order of completion they are too short.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.data.ledger import Order, Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger

TASK = Task("test", (), ("yes",), "train", 0)
BATCH = 8  # groups
UPDATE = 20.0  # seconds of an update


def drawn(seed: int, count: int) -> list[int]:
    """Return lengths in tokens with a long tail: the median is 50, and 1 in 100 is above 500."""
    source = random.Random(seed)
    return [1 + int(source.lognormvariate(3.9, 1.0)) for _ in range(count)]


def episode(tokens: int) -> Trajectory:
    return Trajectory(TASK, (1,), (Turn((7,) * tokens, (-0.5,) * tokens, (), 0.0, ((0, tokens),)),), "ok")


@dataclass
class Simulated:
    """Training with replicas that play every admitted episode at once, a token per second."""

    order: Order
    lengths: list[int]  # of the episodes, in order of admission
    samples: int = 1
    staleness: int = 2
    now: float = 0.0
    trained: list[int] = field(default_factory=list)  # lengths

    def __post_init__(self) -> None:
        terms = Terms(BATCH, self.samples, self.staleness, self.order)
        self.ledger = EpisodeLedger(TaskCursor((TASK,), 0), terms)
        self._playing: list[tuple[float, int]] = []  # (end in seconds, number of the episode)

    def train(self, iterations: int) -> None:
        for iteration in range(iterations):
            for admitted in self.ledger.admit(iteration):
                heapq.heappush(self._playing, (self.now + self.lengths[admitted.number], admitted.number))
            self._finish_until(self.now)
            while (batch := self.ledger.batch()) is None:
                self._finish_until(max(self.now, self._playing[0][0]))
            self.trained += [len(played.turns[0].token_ids) for played in batch]
            self.now += UPDATE

    def finish_all(self) -> None:
        self._finish_until(float("inf"))

    def _finish_until(self, time: float) -> None:
        while self._playing and self._playing[0][0] <= time:
            self.now, number = heapq.heappop(self._playing)
            self.ledger.finish(number, episode(self.lengths[number]))
        self.now = max(self.now, time) if time < float("inf") else self.now


def mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 3), st.integers(1, 8))
def test_in_order_of_admission_the_lengths_trained_on_are_the_first_ones_drawn(
    seed: int, samples: int, staleness: int, iterations: int
) -> None:
    lengths = drawn(seed, BATCH * samples * (iterations + staleness))
    run = Simulated("admission", lengths, samples, staleness)
    run.train(iterations)
    assert sorted(run.trained) == sorted(lengths[: BATCH * samples * iterations])


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 8))
def test_in_order_of_completion_they_are_never_longer_on_average(
    seed: int, staleness: int, iterations: int
) -> None:
    """An episode that was admitted later and completed earlier is shorter than the one it has replaced."""
    lengths = drawn(seed, BATCH * (iterations + staleness))
    run = Simulated("completion", lengths, staleness=staleness)
    run.train(iterations)
    first = lengths[: BATCH * iterations]
    assert mean(run.trained) <= mean(first)
    run.finish_all()
    assert run.ledger.bias()["length_bias"] == pytest.approx(mean(run.trained) - mean(first))


def test_the_bias_is_reported_while_slow_episodes_are_still_played_and_grows_when_they_finish() -> None:
    lengths = drawn(0, BATCH * 8)
    run = Simulated("completion", lengths, staleness=4)
    run.train(4)
    before, whole = run.ledger.bias(), mean(run.trained) - mean(lengths[: BATCH * 4])
    assert before["overtaken"] > 0
    assert whole < before["length_bias"] < 0
    run.finish_all()
    assert run.ledger.bias()["length_bias"] == pytest.approx(whole)
