from __future__ import annotations

import torch

from megatron_stppo.base.types import Batch, EstimatedBatch, ScoredBatch, Task, Trajectory, Turn
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training.advantage import action_rows, with_observations

TASK = Task("t", (), ("a",), "train", 0)


def batch() -> Batch:
    """Return types.Trajectory's example, one that never began, and a prompt of 1 with a turn of 2 tokens."""
    first = (
        Turn((1, 2, 3), (-1.0, -2.0, -3.0), (7,) * 4, 0.5, ((0, 3),)),
        Turn((4,), (-4.0,), (), 1.0, ((0, 1),)),
    )
    second = (Turn((5, 6), (-5.0, -6.0), (8,), 2.0, ((0, 2),)),)
    played = [
        Trajectory(TASK, (9, 9), first, "ok"),
        Trajectory(TASK, (9,) * 3, (), "error"),
        Trajectory(TASK, (9,), second, "ok"),
    ]
    return to_batch(played)


def test_all_tokens_after_the_prompt_are_included_and_a_turn_ends_with_its_observation() -> None:
    whole = with_observations(batch())
    assert whole.action_index_T.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16]
    assert whole.turn_offsets.tolist() == [0, 7, 8, 11]
    assert whole.action_offsets.tolist() == [0, 8, 8, 11]
    assert whole.turn_to_sequence_S.tolist() == [0, 0, 2]
    assert whole.live_T.tolist() == [True] * 11


def test_observations_have_no_reward_and_no_logprob() -> None:
    given = ScoredBatch.of(batch(), epochs=(), old_logprob_T=torch.tensor([1.0, 2, 3, 4, 5, 6]))
    whole = with_observations(given)
    assert whole.reward_T.tolist() == [0, 0, 0.5, 0, 0, 0, 0, 1, 0, 2, 0]
    assert whole.rollout_logprob_T.tolist() == [-1, -2, -3, 0, 0, 0, 0, -4, -5, -6, 0]
    assert whole.old_logprob_T is not None
    assert whole.old_logprob_T.tolist() == [1, 2, 3, 0, 0, 0, 0, 4, 5, 6, 0]
    assert whole.reference_logprob_T is None


def test_values_and_returns_are_those_of_observations_too() -> None:
    of_all = {"value_R": torch.arange(11.0), "return_R": torch.arange(11.0) + 20}
    of_actions = {name: torch.zeros(6) for name in ("advantage_T", "value_T", "return_T")}
    whole = with_observations(EstimatedBatch.of(batch(), epochs=(), **of_all, **of_actions))
    assert whole.value_T is of_all["value_R"] and whole.return_T is of_all["return_R"]


def test_action_rows_are_the_positions_of_the_action_tokens() -> None:
    rows = action_rows(batch())
    assert rows.tolist() == [0, 1, 2, 7, 8, 9]
    assert torch.equal(with_observations(batch()).action_index_T[rows], batch().action_index_T)
