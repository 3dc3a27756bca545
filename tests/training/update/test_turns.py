"""Records of turns, with numbers to check by hand. Ratios are given, old log-probs are 0, clip 0.2.

Turns have 2 tokens, so their bounds are 0.9 and 1.1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_stppo.base.types import Task, Trajectory, Turn, UpdatedBatch
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training.update.actor_step import minibatch_weights
from megatron_stppo.training.update.ratios import StepRatios, turns

TASK = Task("t", (), ("a",), "train", 0)
# Turn one: token ratios 1.44 and 1, geometric mean 1.2. Turn two: 0.25 and 1, mean 0.5.
RATIO_T = [1.44, 1.0, 0.25, 1.0, 9.0]


def batch(failed: str = "timeout") -> UpdatedBatch:
    """Return a trajectory of two turns, and a failed one of a single token."""
    first = Trajectory(
        TASK,
        (1,),
        (Turn((5, 6), (-1.0, -1.0), (7,), 0.0, ((0, 2),)), Turn((8, 9), (0.0, 0.0), (), 1.0, ((0, 2),))),
        "ok",
    )
    packed = to_batch([first, Trajectory(TASK, (1,), (Turn((2,), (0.0,), (), 0.0, ((0, 1),)),), failed)])
    advantage_T = torch.tensor([1.0, 2.0, -1.0, -1.0, 5.0])
    return UpdatedBatch.of(packed, epochs=(), old_logprob_T=torch.zeros(5), advantage_T=advantage_T)


def records(given: UpdatedBatch, **algorithm: object) -> list[list[dict[str, float | None]]]:
    a = AlgorithmConfig.model_validate(algorithm)
    logprob_T = torch.tensor(RATIO_T, dtype=torch.float64).log().float()
    every = range(len(given.live_N))
    last = StepRatios.of(given, logprob_T, minibatch_weights(given, every, a), every, a)
    return list(turns(given, last, a))


def test_a_turn_has_its_ratio_its_mean_advantage_and_its_clipped_tokens() -> None:
    (one, two), (failed,) = records(batch(), preset="st_ppo")
    assert one == {
        "tokens": 2,
        "advantage": 1.5,
        "ratio": 1.2,
        "clipped": 2,
        "mismatch": pytest.approx(2.71828),
    }
    assert two == {"tokens": 2, "advantage": -1.0, "ratio": 0.5, "clipped": 2, "mismatch": 1.0}
    assert failed == {"tokens": 1, "advantage": None, "ratio": None, "clipped": None, "mismatch": None}


@pytest.mark.parametrize(
    ("preset", "clipped"), [("ppo", [1, 1]), ("turn_ppo", [2, 2]), ("paper", [0, 2]), ("gspo", [0, 2])]
)
def test_tokens_are_clipped_by_the_segments_of_the_algorithm(preset: str, clipped: list[int]) -> None:
    """The trajectory's ratio is (1.44 * 0.25)^(1/4) = 0.775: below the bound where A < 0.

    A turn of ratio 1.2 is on the bound of `paper`, which does not follow the length.
    """
    told = records(batch(), preset=preset)[0]
    assert [turn["clipped"] for turn in told] == clipped
    assert [turn["ratio"] for turn in told] == [1.2, 0.5]


def test_numbers_that_are_not_finite_are_none_and_values_need_a_critic() -> None:
    given = batch()
    given = replace(given, value_T=torch.tensor([1.0, 3.0, float("nan"), 0.0, 0.0]))
    (one, two), _ = records(given, preset="ppo")
    assert (one["value"], two["value"]) == (2.0, None)


def test_a_refused_update_records_nothing() -> None:
    assert not list(turns(batch(), None, AlgorithmConfig.model_validate({"preset": "ppo"})))
