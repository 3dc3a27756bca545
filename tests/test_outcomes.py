"""How an episode ended, from its trajectory to the metrics and the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_stppo.algorithm.aggregation import token_weights
from megatron_stppo.data.packing import to_batch
from megatron_stppo.describe import describe
from megatron_stppo.types import Message, Outcome, Task, Trajectory, Turn

TASK = Task("t", (Message("user", "?"),), ("x",), "train", 0)
OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "truncated", "error", "timeout")


def trajectory(outcome: Outcome, tokens: int = 2, reward: float = 0.0) -> Trajectory:
    return Trajectory(TASK, (1,), (Turn((5,) * tokens, (-1.0,) * tokens, (), reward, 0),), outcome)


def unplayed(outcome: Outcome) -> Trajectory:
    """What an environment that fails in reset leaves."""
    return Trajectory(TASK, (), (), outcome)


def test_every_outcome_is_counted_in_the_metrics() -> None:
    played = [
        trajectory(outcome) for outcome, n in zip(OUTCOMES, (1, 2, 3, 4, 5), strict=True) for _ in range(n)
    ]
    batch = to_batch(played)
    row = describe(played, replace(batch, old_logprob_T=batch.rollout_logprob_T))
    assert [row[f"outcome/{outcome}"] for outcome in OUTCOMES] == [1, 2, 3, 4, 5]


def test_episodes_that_never_began_are_counted_too() -> None:
    played = [trajectory("ok"), unplayed("error"), unplayed("timeout"), unplayed("timeout")]
    batch = to_batch(played)
    row = describe(played, replace(batch, old_logprob_T=batch.rollout_logprob_T))
    assert (row["outcome/ok"], row["outcome/error"], row["outcome/timeout"]) == (1, 1, 2)
    assert row["reward/mean"] == 0.0 and row["rollout/turns"] == 1.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "turn_mean"])
def test_failures_of_the_environment_weigh_nothing_in_the_loss(aggregation: str) -> None:
    """Two tokens each of ok, wrong, truncated, error, timeout: the first three share the loss in thirds."""
    batch = to_batch([trajectory(outcome) for outcome in OUTCOMES])
    weight_T = token_weights(aggregation, batch.live_T, batch.turn_offsets, batch.action_offsets)  # type: ignore[arg-type]
    torch.testing.assert_close(weight_T, torch.tensor([1 / 6] * 6 + [0.0] * 4))


def test_mismatch_between_engine_and_trainer_is_read_from_what_carries_loss() -> None:
    played = [trajectory("ok"), trajectory("timeout")]
    batch = to_batch(played)
    old = batch.rollout_logprob_T + torch.tensor([0.5, 0.5, 9.0, 9.0])
    assert describe(played, replace(batch, old_logprob_T=old))["mismatch/mean_abs"] == pytest.approx(0.5)
