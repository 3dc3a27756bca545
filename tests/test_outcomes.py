"""The outcome of an episode in its trajectory, the metrics and the loss."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from megatron_stppo.algorithm.aggregation import token_weights
from megatron_stppo.base.types import (
    Batch,
    Message,
    Outcome,
    Summary,
    Task,
    Trajectory,
    Turn,
    UpdatedBatch,
    Versions,
)
from megatron_stppo.data.packing import to_batch
from megatron_stppo.observe.describe import (
    current_mismatch,
    describe_batch,
    describe_rollouts,
    standard_error,
)

TASK = Task("t", (Message("user", "?"),), ("x",), "train", 0)
OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "truncated", "error", "timeout")


def trajectory(outcome: Outcome, tokens: int = 2, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        TASK, (1,), (Turn((5,) * tokens, (-1.0,) * tokens, (), reward, ((0, tokens),)),), outcome
    )


def unplayed(outcome: Outcome) -> Trajectory:
    """Return the trajectory of an environment that fails in reset."""
    return Trajectory(TASK, (), (), outcome)


def updated(batch: Batch, **columns: torch.Tensor) -> UpdatedBatch:
    """Return the batch after an update with these columns. Advantages are 0 if they are not given."""
    return UpdatedBatch.of(
        batch, **({"epochs": (), "advantage_T": torch.zeros_like(batch.reward_T)} | columns)
    )


def summaries(played: list[Trajectory]) -> list[Summary]:
    return [t.summary for t in played]


def test_every_outcome_is_counted_in_the_metrics() -> None:
    played = [
        trajectory(outcome) for outcome, n in zip(OUTCOMES, (1, 2, 3, 4, 5), strict=True) for _ in range(n)
    ]
    row = describe_rollouts(summaries(played), 0)
    assert [row[f"outcome/{outcome}"] for outcome in OUTCOMES] == [1, 2, 3, 4, 5]


def test_episodes_that_never_began_are_counted_too() -> None:
    played = [trajectory("ok"), unplayed("error"), unplayed("timeout"), unplayed("timeout")]
    row = describe_rollouts(summaries(played), 0)
    assert (row["outcome/ok"], row["outcome/error"], row["outcome/timeout"]) == (1, 1, 2)
    assert row["reward/mean"] == 0.0 and row["rollout/turns"] == 1.0


@pytest.mark.parametrize("aggregation", ["token_mean", "turn_mean", "sequence_mean_token_mean"])
def test_failures_of_the_environment_have_no_weight_in_the_loss(aggregation: str) -> None:
    """There are two tokens each of ok, wrong, truncated, error and timeout.

    The first three weigh 1/3 each.
    """
    batch = to_batch([trajectory(outcome) for outcome in OUTCOMES])
    weight_T = token_weights(aggregation, batch.live_T, batch.turn_offsets, batch.action_offsets)  # type: ignore[arg-type]
    torch.testing.assert_close(weight_T, torch.tensor([1 / 6] * 6 + [0.0] * 4))


def test_mismatch_between_engine_and_trainer_is_measured_on_tokens_with_loss() -> None:
    played = [trajectory("ok"), trajectory("timeout")]
    batch = to_batch(played)
    old = batch.rollout_logprob_T + torch.tensor([0.5, 0.5, 9.0, 9.0])
    assert describe_batch(updated(batch, old_logprob_T=old))["mismatch/mean_abs"] == pytest.approx(0.5)


def test_metrics_of_behaviour_match_a_hand_calculation() -> None:
    """Two episodes were played, of 2 and 1 turns, when the policy was at version 5.

    Version 3 wrote the first turn; the second turn was begun by version 4 and completed by version 5; version
    4 wrote the third turn. Of the 7 tokens, 2 are 2 versions old, 4 are 1 version old, and 1 is current.
    """
    played_turns = ((2, 0.0, ((3, 2),)), (4, 1.0, ((4, 3), (5, 1))), (1, 0.0, ((4, 1),)))
    turns = [Turn((5,) * n, (-1.0,) * n, (), r, versions) for n, r, versions in played_turns]
    played = [
        Trajectory(
            TASK, (1,), tuple(turns[:2]), "ok", tool_calls=1, valid_actions=2, metrics={"a": 1, "b": 2}
        ),
        Trajectory(TASK, (1,), (turns[2],), "truncated", tool_calls=0, valid_actions=0, metrics={"a": 0}),
        unplayed("error"),
    ]
    row = describe_rollouts(summaries(played), version=5)
    expected = {
        "reward/mean": 0.5,
        "rollout/exact_match": 0.5,
        "rollout/called_tool": 0.5,
        "rollout/tool_calls": 0.5,
        "rollout/turns": 1.5,
        "rollout/valid_action_rate": 2 / 3,
        "rollout/truncated": 0.5,
        "rollout/response_tokens": 3.5,
        "rollout/response_tokens_p95": 6,
        "rollout/response_tokens_max": 6,
        "rollout/staleness": 3 / 2,
        "rollout/staleness_max": 2,
        "staleness/tokens_0": 1 / 7,
        "staleness/tokens_1": 4 / 7,
        "staleness/tokens_2": 2 / 7,
        "environment/a": 1 / 2,
        "environment/b": 2,  # of the one episode that has it
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert "staleness/tokens_3" not in row
    assert all(
        value == 0 or name == "outcome/error"
        for name, value in describe_rollouts([played[2].summary], 5).items()
    )


def test_the_95th_percentile_is_the_nearest_rank() -> None:
    played = [trajectory("ok", tokens=n) for n in range(1, 41)]
    assert describe_rollouts(summaries(played), 0)["rollout/response_tokens_p95"] == 38


def test_metrics_of_a_scored_batch_match_a_hand_calculation() -> None:
    """Two live tokens have log-probs -1, -2 and reference -2, -2; values are 0, 1 and returns 1, 1."""
    played = [trajectory("ok", reward=1.0), trajectory("timeout", reward=999.0)]
    batch = updated(
        to_batch(played),
        old_logprob_T=torch.tensor([-1.0, -2.0, 9.0, 9.0]),
        reference_logprob_T=torch.tensor([-2.0, -2.0, 9.0, 9.0]),
        advantage_T=torch.tensor([3.0, 1.0, 9.0, 9.0]),
        value_T=torch.tensor([0.0, 1.0, 9.0, 9.0]),
        return_T=torch.tensor([1.0, 1.0, 9.0, 9.0]),
    )
    row = describe_batch(batch)
    expected = {
        "kl/reference": 0.5,
        "kl/reference_k3": math.exp(-1) / 2,  # exp(-1) - 1 + 1 and 0
        "advantage/mean": 2.0,
        "advantage/variance": 1.0,
        "advantage/variance_before_whitening": 0.25,  # returns minus values: 1 and 0
        "mismatch/mean_abs": 0.5,  # the engine's log-probs are -1 and -1
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    varied = replace(batch, return_T=torch.tensor([0.0, 2.0, 9.0, 9.0]))  # errors 0 and 1: 1 - 0.5 / 2
    assert describe_batch(varied)["critic/explained_variance"] == pytest.approx(0.75)
    of_penalties = replace(batch, return_T=torch.tensor([1.0, 0.99, 9.0, 9.0]))
    unrewarded = replace(varied, reward_T=torch.tensor([0.0, 0.0, 9.0, 9.0]))
    for same in (batch, of_penalties, unrewarded):
        assert "critic/explained_variance" not in describe_batch(same)


def test_the_engine_is_compared_with_the_trainer_on_tokens_of_the_current_version() -> None:
    """The trainer's log-probs are -1, -1.25 and -3, the engine's -1: by versions 0, 1 and 2."""
    turn = Turn((5, 6, 7), (-1.0,) * 3, (), 0.0, ((0, 1), (1, 1), (2, 1)))
    batch = to_batch([Trajectory(TASK, (1,), (turn,), "ok"), trajectory("timeout")])
    logprob_T, known_T = torch.tensor([-1.0, -1.25, -3.0, 9.0, 9.0]), torch.ones(5, dtype=torch.bool)
    found = [current_mismatch(batch, logprob_T, known_T, version) for version in range(4)]
    expected = [{"mismatch/current_mean_abs": difference} for difference in (0.0, 0.25, 2.0)]
    assert found == [*expected, {}], "no token is of version 3: nothing is compared"
    unknown_T = torch.tensor([True, True, False, True, True])
    assert current_mismatch(batch, logprob_T, unknown_T, 2) == {}


@pytest.mark.parametrize(
    "versions", [(), ((3, 1),), ((3, 3),), ((4, 1), (3, 1)), ((3, 2), (4, 0)), ((-1, 2),)]
)
def test_versions_that_are_not_those_of_the_tokens_are_refused(versions: Versions) -> None:
    with pytest.raises(ValueError, match="of 2 tokens together"):
        Turn((5, 6), (-1.0, -1.0), (), 0.0, versions)


def test_the_standard_error_counts_episodes_of_one_task_as_dependent() -> None:
    assert standard_error([1, 1, 0, 0], [7, 7, 8, 8]) == pytest.approx(0.5)
    assert standard_error([1, 1, 0, 0], [1, 2, 3, 4]) == pytest.approx(statistics.stdev([1, 1, 0, 0]) / 2)
    # means 1 and 0 of three and one episodes: sqrt(2 (3 / 4)^2 2) / 4
    assert standard_error([1, 1, 1, 0], [1, 1, 1, 2]) == pytest.approx(1.5 / 4)
    assert standard_error([], []) == standard_error([1, 0], [3, 3]) == 0


def test_the_standard_error_is_that_of_many_draws_of_tasks() -> None:
    generator = random.Random(0)
    tasks = [task for task in range(8) for _ in range(4)]
    means, errors = [], []
    for _ in range(2000):
        of_task = [float(generator.random() < 0.5) for _ in range(8)]  # all four episodes end alike
        means.append(statistics.fmean(of_task))
        errors.append(standard_error([of_task[task] for task in tasks], tasks) ** 2)
    assert statistics.fmean(errors) == pytest.approx(statistics.variance(means), rel=0.05)
