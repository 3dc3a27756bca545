"""Checks that a reward arrives at the last action token of its turn, and at no other token.

Every turn gets a whole number of its own. Sums of them are exact in float32, so all comparisons of GAE are
exact. What is expected is computed from the numbers of tokens alone, by the definition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_stppo.base.types import FAILED, DividedBatch, ScoredBatch, Summary, Trajectory
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.observed import with_observations
from megatron_stppo.data.packing import groups_of
from megatron_stppo.evidence.bench import definition
from megatron_stppo.evidence.bench.definition import ExactToken, ExactTurn
from megatron_stppo.evidence.bench.stage import Checked, Stage, first_wrong, judged
from megatron_stppo.evidence.checks.advantages import episodes_of
from megatron_stppo.training.advantage import estimate
from megatron_stppo.training.stages import distribute

LAND = "rewards land"
Rewards = Sequence[Sequence[float]]  # of every turn of every trajectory
T = TypeVar("T", Summary, Trajectory)
# without the terms that have checks or inputs of their own
PLAIN: dict[str, Any] = {
    "whiten": False,
    "kl_coefficient": 0.0,
    "truncated": "end",
    "overlong_from": None,
    "overlong_to": None,
}
GAE: dict[str, Any] = {"advantage": "gae", "gamma": 1.0, "lam_critic": None, "lam_length": None}


def landing(stage: Stage) -> Iterator[Checked]:
    """Compare the rewards of the episodes, and of planted ones, with the advantages. Collective."""
    plain = stage.config.algorithm.changed(**PLAIN)
    played, rewards = planted(stage.played)
    batch = distribute(stage.learner, played, 0)
    wrong, known = _credited(stage), sum(stage.record(n) is not None for n in range(len(stage.episodes)))
    compared = f"rewards of {known} compared with the environment's"
    tokens = len(batch.reward_T)
    for lam in (0.0, 1.0):
        gae = plain.changed(**GAE, lam=lam)
        with_values = estimate(_valued(batch, gae), gae, groups_of(played.every))
        assert with_values.return_T is not None
        needed = expected(played.every, rewards, gae)
        for name, value_T in (("advantage", with_values.advantage_T), ("return", with_values.return_T)):
            wrong += first_wrong(f"{name} with lambda {lam:.0f}", value_T.tolist(), needed)
    yield judged(
        LAND,
        not wrong,
        wrong[0] if wrong else f"{tokens:,} action tokens of {len(played.every)} episodes ({compared})",
        "environment, algorithm: report this line; a reward is credited to tokens that did not earn it",
    )


def planted(played: Played) -> tuple[Played, Rewards]:
    """Return the episodes with another whole number as the reward of each turn, and these numbers.

    The first episode that has turns is failed.
    """
    number = count(1)
    rewards = [[float(next(number)) for _ in summary.turns] for summary in played.every]
    start = next((n for n, summary in enumerate(played.every) if summary.turns), 0)
    end = next((n for n in range(start + 1, len(rewards)) if played.every[n].branch == 0), len(rewards))
    return rewarded(played, rewards, range(start, end)), rewards


def rewarded(played: Played, rewards: Rewards, failed: Collection[int] = ()) -> Played:
    """Return the episodes with these rewards, and with the outcome `error` for the trajectories `failed`."""

    def changed(number: int, episode: T) -> T:
        turns = tuple(replace(t, reward=r) for t, r in zip(episode.turns, rewards[number], strict=True))
        return replace(episode, turns=turns, outcome="error" if number in failed else episode.outcome)

    first = sum(played.counts[: dist.get_rank()])
    every = [changed(n, summary) for n, summary in enumerate(played.every)]
    return replace(played, every=every, own=[changed(first + n, t) for n, t in enumerate(played.own)])


def expected(every: Sequence[Summary], rewards: Rewards, algorithm: AlgorithmConfig) -> list[float]:
    """Return what GAE must give every action token, with values of 0.

    Example: a turn of 2 tokens and one of 1, rewards (1, 2): (0, 1, 2) with lambda 0, (3, 3, 2) with 1.
    """
    turns = [
        [
            ExactTurn([ExactToken(0.0) for _ in range(turn.tokens)], [], reward)
            for turn, reward in zip(summary.turns, own, strict=True)
        ]
        for summary, own in zip(every, rewards, strict=True)
    ]
    definition.estimate(episodes_of(every, turns), algorithm)
    return [token.advantage for history in turns for turn in history for token in turn.acted]


def _credited(stage: Stage) -> list[str]:
    """Return where the episodes have other rewards than their environments gave, or the batch has others
    than the episodes."""
    wrong = list[str]()
    for n, trajectory in enumerate(stage.episodes):
        record = stage.record(n)
        if record is None or trajectory.outcome in FAILED:
            continue
        unanswered = [0.0] * (len(trajectory.turns) - len(record.rewards))
        rewards = [turn.reward for turn in trajectory.turns]
        if rewards != [*record.rewards, *unanswered]:
            wrong.append(f"episode {n}: rewards {rewards}, and its environment gave {record.rewards}")
    turns = (turn for trajectory in stage.episodes for turn in trajectory.summary.turns)
    at_ends = [reward for turn in turns for reward in (*[0.0] * (turn.tokens - 1), turn.reward)]
    return wrong + first_wrong("reward", stage.batch.reward_T.tolist(), at_ends)


def _valued(batch: DividedBatch, algorithm: AlgorithmConfig) -> ScoredBatch:
    """Return the batch with values of 0."""
    value_R = None
    if algorithm.gae_observations:
        value_R = torch.zeros(len(with_observations(batch).reward_T))
    return ScoredBatch.of(batch, value_T=torch.zeros_like(batch.reward_T), value_R=value_R)
