from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_stppo.algorithm.surrogate import surrogate
from megatron_stppo.base.types import EstimatedBatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training.update.actor_step import minibatch_weights
from megatron_stppo.training.update.ratios import Ratios, StepRatios

TASK = Task("t", (), ("a",), "train", 0)


def batch(*turns: tuple[int, ...], rollout: float = 0.0) -> EstimatedBatch:
    """Return a trajectory per argument, with turns of these lengths. Old log-probs are 0, advantages 1."""
    played = [
        Trajectory(
            TASK, (9,), tuple(Turn((5,) * n, (rollout,) * n, (7,), 0.0, ((0, n),)) for n in sizes), "ok"
        )
        for sizes in turns
    ]
    packed = to_batch(played)
    zeros_T = torch.zeros(len(packed.action_index_T))
    return EstimatedBatch.of(packed, epochs=(), old_logprob_T=zeros_T, advantage_T=zeros_T + 1)


def row_of(given: EstimatedBatch, ratios: list[float], **settings: object) -> dict[str, float]:
    """Return the row of one step on the whole batch, with these token ratios."""
    a = AlgorithmConfig.model_validate({"preset": "turn_ppo", **settings})
    out, weight_T = Ratios(given, a), torch.ones(len(ratios))
    out.add(StepRatios.of(given, torch.tensor(ratios).log(), weight_T, range(len(given.live_N)), a))
    return out.row()


def test_clip_fraction_by_turn_matches_a_hand_calculation() -> None:
    # Turns of 2 and 1 tokens, and of 1 token, A = 1, bounds 1.1 and 1.2. Ratios: sqrt(1 * 4) = 2, 1, 1.
    row = row_of(batch((2, 1), (1,)), [1.0, 4.0, 1.0, 1.0])
    assert row["actor/clip_fraction_turn_1"] == pytest.approx(2 / 3)
    assert row["actor/clip_fraction_turn_2"] == 0
    assert row["actor/clip_fraction_turn_last"] == 0  # turn 2 of the one, turn 1 of the other
    # At token level only the token of ratio 4 is clipped.
    row = row_of(batch((2, 1), (1,)), [1.0, 4.0, 1.0, 2.0], segments="token")
    assert row["actor/clip_fraction_turn_1"] == pytest.approx(2 / 3)
    assert row["actor/clip_fraction_turn_last"] == 0.5


def test_quantiles_are_over_segments_and_by_nearest_rank() -> None:
    # Token level: ratios 1 .. 200 in any order: 1 % are <= 2, half <= 100, 99 % <= 198.
    ratios = [float(r) for r in range(200, 0, -1)]
    row = row_of(batch((100, 100)), ratios, segments="token")
    found = [row[f"actor/ratio_{name}"] for name in ("p1", "p50", "p99", "max")]
    assert found == pytest.approx([2, 100, 198, 200], rel=1e-5)
    # Two turns: one ratio each, whatever their length.
    row = row_of(batch((3, 1)), [2.0, 2.0, 2.0, 8.0])
    assert [row["actor/ratio_p50"], row["actor/ratio_max"]] == pytest.approx([2, 8])


def test_steps_of_an_iteration_count_with_the_tokens_that_they_had() -> None:
    given = batch((2,), (1,))
    a = AlgorithmConfig(preset="turn_ppo")
    out = Ratios(given, a)

    def add(ratios: list[float], weights: list[float], chosen: list[int]) -> None:
        out.add(StepRatios.of(given, torch.tensor(ratios).log(), torch.tensor(weights), chosen, a))

    # Step one: the first trajectory alone, at 2: clipped. The other's log-probs are ignored.
    add([2.0, 2.0, math.nan], [0.5, 0.5, 0.0], [0])
    # Step two: the second alone, at 1.
    add([math.nan, 9.0, 1.0], [0.0, 0.0, 1.0], [1])
    assert out.first is not None and out.first.chosen_T.tolist() == [True, True, False]
    assert out.last is not None
    assert out.last.logprob_T.exp().tolist() == pytest.approx([2, 2, 1])
    assert out.last.ratio_S.tolist() == pytest.approx([2, 1])
    assert out.last.clipped_T.tolist() == [True, True, False]
    assert out.last.live_T.all() and out.last.chosen_T.all()
    row = out.row()
    assert row["actor/clip_fraction_turn_1"] == pytest.approx(2 / 3)
    assert row["actor/ratio_p50"] == 1 and row["actor/ratio_max"] == pytest.approx(2)


def test_turns_that_leave_the_surrogate_are_not_selected_and_not_clipped() -> None:
    """Turns of 2 and 1 tokens, A = 1, with ratios of e^0.3 and e^0.1; both would be clipped."""
    given, a = batch((2, 1)), AlgorithmConfig(preset="sao", segments="turn", clip_high=0.2)
    logprob_T = torch.tensor([0.3, 0.3, 0.1])
    step = StepRatios.of(given, logprob_T, torch.ones(3), [0], a)
    assert step.left_T.tolist() == [True, True, False] and not step.clipped_T.any()
    assert step.selected == pytest.approx(1 / 3)
    assert StepRatios.of(given, logprob_T, torch.zeros(3), [0], a).selected == 1
    own = StepRatios.of(replace(given, old_logprob_T=None), logprob_T, torch.ones(3), [0], a)
    assert own.ratio_S.tolist() == [1, 1] and own.selected == 1, "this policy is the old one"


def test_without_a_step_nothing_is_reported() -> None:
    assert Ratios(batch((1,)), AlgorithmConfig(preset="ppo")).row() == {}


def test_a_ratio_that_is_not_a_number_is_not_hidden() -> None:
    assert math.isnan(row_of(batch((1, 1)), [1.0, math.nan])["actor/ratio_p50"])


def test_reported_clipping_is_that_of_the_surrogate() -> None:
    given = batch((3, 2), (4,), (1, 1, 2))
    generator = torch.Generator().manual_seed(0)
    logprob_T, advantage_T = torch.randn(2, 13, generator=generator)
    given = replace(given, advantage_T=advantage_T)
    for segments, offsets in (
        ("token", None),
        ("turn", given.turn_offsets),
        ("sequence", given.action_offsets),
    ):
        a = AlgorithmConfig(preset="turn_ppo", segments=segments)  # type: ignore[arg-type]
        out = Ratios(given, a)
        out.add(StepRatios.of(given, logprob_T, torch.ones(13), range(3), a))
        whole = surrogate(
            *(logprob_T, torch.zeros(13), advantage_T, torch.ones(13), offsets),
            clip_low=0.2,
            clip_high=0.2,
            clip_length_power=1.0,
        )
        assert 0 < whole.clipped_T.sum() < 13
        row = out.row()
        first = [0, 1, 2, 5, 6, 7, 8, 9]  # of each trajectory's first turn
        assert row["actor/clip_fraction_turn_1"] == pytest.approx(
            float(whole.clipped_T[first].float().mean())
        )
        assert row["actor/ratio_max"] == pytest.approx(float(whole.ratio_S.max()))


def test_without_live_tokens_nothing_is_reported() -> None:
    given, a = batch((1,)), AlgorithmConfig(preset="turn_ppo")
    out = Ratios(given, a)
    out.add(StepRatios.of(given, torch.zeros(1), torch.zeros(1), [0], a))
    assert out.row() == {}


def test_mini_rl_weighs_a_token_by_its_probability_in_the_engine() -> None:
    """Two trajectories have 2 and 1 tokens. Old probabilities are e^2, 8 and 1/2 times the engine's.

    With sums over tokens, the mean over 2 trajectories, and truncation at 5, the weights are 5/2, 5/2 and
    1/4.
    """
    a = AlgorithmConfig(preset="mini_rl")
    given = batch((2,), (1,))
    given = replace(given, rollout_logprob_T=torch.tensor([-2.0, -math.log(8), math.log(2)]))
    weight_T = minibatch_weights(given, [0, 1], a)
    assert weight_T.tolist() == pytest.approx([2.5, 2.5, 0.25])
    # Ratios 1.1, 1.3, 1.3 with A = 1/2, 1/2, -1/2, bound 1.27: g = c w A, but for token 2, which is clipped.
    out = surrogate(
        *(
            torch.tensor([1.1, 1.3, 1.3]).log(),
            torch.zeros(3),
            torch.tensor([0.5, 0.5, -0.5]),
            weight_T,
            None,
        ),
        clip_low=a.clip_low,
        clip_high=a.clip_high,
    )
    assert out.gradient_T.tolist() == pytest.approx([2.5 * 1.1 / 2, 0, -0.25 * 1.3 / 2])


def test_a_masked_token_leaves_the_loss_and_its_turn_at_turn_level() -> None:
    """MIS, bound 2: ratios 4 and 1 in a turn: the turn's is sqrt(4) = 2 (kept), the token's 4 is masked. Then
    the loss is a mean over the other token alone."""
    given = replace(batch((2,)), rollout_logprob_T=torch.tensor([-math.log(4.0), 0.0]))
    weights = {
        level: minibatch_weights(
            given,
            [0],
            AlgorithmConfig(preset="ppo", mismatch="mask", mismatch_level=level, mismatch_bound=2.001),
        ).tolist()
        for level in ("token", "turn", "sequence")
    }
    assert weights["token"] == pytest.approx([0, 1])
    assert weights["turn"] == weights["sequence"] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("kind", "level", "factors"),
    [
        ("truncate", "token", [3, 1, 1, 1, 1]),
        ("truncate", "turn", [3, 3, 1, 1, 1]),
        ("truncate", "sequence", [2, 2, 2, 2, 1]),
        ("mask", "token", [0, 1, 1, 1, 1]),
        ("mask", "turn", [0, 0, 1, 1, 1]),
        ("mask", "sequence", [2, 2, 2, 2, 1]),
    ],
)
def test_a_stale_token_is_weighed_alone_or_with_its_turn_or_trajectory(
    kind: str, level: str, factors: list[float]
) -> None:
    """The bound is 3. In a trajectory with two turns of 2 tokens, an older policy wrote the first token.

    It is 16 times as likely now: 16 alone, sqrt(16) = 4 in its turn, 16^(1/4) = 2 in its trajectory. The one
    token of another trajectory is current.
    """
    given = replace(batch((2, 2), (1,)), rollout_logprob_T=torch.tensor([-math.log(16), 0, 0, 0, 0]))
    settings = {"preset": "ppo", "mismatch": kind, "mismatch_level": level, "mismatch_bound": 3.0}
    weight_T = minibatch_weights(given, [0, 1], AlgorithmConfig.model_validate(settings))
    kept = sum(factor > 0 for factor in factors)
    assert weight_T.tolist() == pytest.approx([factor / kept for factor in factors])


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("kind", ["off", "truncate", "mask"])
def test_a_failed_trajectory_may_be_nan_with_a_mismatch_weight(kind: str, level: str) -> None:
    given = batch((1, 1), (2,), (1,))
    nan_T = torch.tensor([0.0, 0.0, math.nan, math.nan, 0.0])
    given = replace(given, live_N=torch.tensor([True, False, True]), rollout_logprob_T=nan_T)
    settings = AlgorithmConfig(preset="st_ppo").changed(mismatch=kind, mismatch_level=level)
    weight_T = minibatch_weights(given, [0, 1, 2], settings)
    assert weight_T.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 1 / 3])
