"""The penalty of long episodes (algorithm.overlong_from), in advantages."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_stppo.base.types import Branch, ScoredBatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training.advantage import estimate, has_signal, with_overlong_penalty

TASK = Task("t", (), ("a",), "train", 0)
RANGE = {"overlong_from": 2, "overlong_to": 6}


def turn(tokens: int, reward: float = 0.0) -> Turn:
    return Turn((5,) * tokens, (-1.0,) * tokens, (7, 7, 7), reward, ((0, tokens),))


def episode(*tokens: int, reward: float = 0.0) -> Trajectory:
    return Trajectory(TASK, (1, 2), tuple(turn(n, reward * (n == tokens[-1])) for n in tokens), "ok")


def settings(**given: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "grpo", "kl_coefficient": 0.0} | given)


def test_the_penalty_is_of_the_action_tokens_and_on_the_last_one() -> None:
    """2 tokens: 0. 1 + 3 tokens: 2 / 4 of the penalty. 7 tokens: all of it. Observations do not count."""
    batch = to_batch([episode(2, reward=1.0), episode(1, 3), episode(7)])
    reward_T = with_overlong_penalty(batch, 2, 6, 0.5).reward_T
    assert reward_T.tolist() == [0, 1] + [0, 0, 0, -0.25] + [0] * 6 + [-0.5]


def test_the_tokens_of_all_histories_count_and_every_history_bears_the_penalty() -> None:
    several = replace(episode(1, 2), branches=(Branch((3,), (turn(1),)), Branch((4,), (turn(2),))))
    batch = to_batch([*several.histories(), *episode(2).histories(), Trajectory(TASK, (), (), "error")])
    reward_T = with_overlong_penalty(batch, 2, 6, 1.0).reward_T
    assert reward_T.tolist() == [0, 0, -1, -1, 0, -1, 0, 0], "6 tokens, then 2"


def test_lengths_are_a_signal_where_rewards_are_equal_and_the_rewards_stay_as_they_were() -> None:
    batch = to_batch([episode(2, reward=1.0), episode(6, reward=1.0)])
    group_N = torch.zeros(2, dtype=torch.int64)
    assert not has_signal(batch, settings(), group_N)
    for preset in ("grpo", "ppo"):
        scored = ScoredBatch.of(batch, epochs=(), value_T=torch.zeros(8))
        out = estimate(scored, settings(preset=preset, **RANGE), group_N)
        assert has_signal(out, settings(preset=preset, **RANGE), group_N)
        assert out.advantage_T[0] > 0 > out.advantage_T[-1]
        assert out.reward_T.equal(batch.reward_T)
