import math
from dataclasses import replace

import pytest
import torch

from megatron_stppo.algorithm.baselines import group_relative, whitened
from megatron_stppo.algorithm.rate import StepMemory
from megatron_stppo.base.types import ScoredBatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training.advantage import estimate, has_signal, outcomes, with_kl_penalty

TASK = Task("geography", (), ("Paris",), "train", 0)


def trajectory(rewards, tokens=2, outcome="ok"):
    """Return a turn of `tokens` tokens per reward, each followed by three observation tokens."""
    turns = tuple(Turn((5,) * tokens, (-1.0,) * tokens, (7, 7, 7), r, ((0, tokens),)) for r in rewards)
    return Trajectory(TASK, (1, 2), turns, outcome)


def scored(trajectories, value=0.0):
    batch = to_batch(trajectories)
    total = len(batch.action_index_T)
    return ScoredBatch.of(
        batch,
        epochs=(),
        old_logprob_T=torch.full((total,), -1.0),
        reference_logprob_T=torch.full((total,), -3.0),
        value_T=torch.full((total,), value),
    )


def settings(**given):
    alone = {"whiten": False} if given.get("preset", "ppo") == "ppo" and "advantage" not in given else {}
    return AlgorithmConfig(**({"preset": "ppo", "kl_coefficient": 0.0} | alone | given))


def groups(batch):
    return torch.zeros(len(batch.live_N), dtype=torch.int64)


def test_equal_outcomes_in_a_group_leave_only_the_kl_penalty_which_is_not_scaled_up():
    batch = scored([trajectory([0.0]), trajectory([0.0])])
    batch = replace(batch, reference_logprob_T=torch.tensor([-1.1, -0.9, -1.2, -1.0]))
    advantage_T = estimate(batch, settings(preset="grpo", kl_coefficient=0.1), groups(batch)).advantage_T
    # old - reference = 0.1, -0.1, 0.2, 0: times -0.1, this token's and the next one's
    assert advantage_T.tolist() == pytest.approx([0.0, 0.01, -0.02, 0.0], abs=1e-7)


def test_group_advantages_subtract_the_kl_of_later_tokens_and_ignore_failed_trajectories():
    batch = scored([trajectory([0.0, 1.0]), trajectory([0.0]), trajectory([0.0], outcome="error")])
    reference_T = torch.tensor([-1.5, -3.0, -1.0, -2.0, -0.5, -1.5, math.nan, math.nan])
    batch = replace(batch, reference_logprob_T=reference_T)
    given = {"kl_coefficient": 0.1}
    by_gae = estimate(batch, settings(**given), groups(batch)).advantage_T
    by_group = estimate(batch, settings(preset="grpo", **given), groups(batch)).advantage_T
    # k1 0.5, 2, 0, 1 and -0.5, 0.5; outcomes 1 and 0: 1 and -1 in their group, 1 and 0 as returns.
    assert by_group.tolist() == pytest.approx([0.65, 0.7, 0.9, 0.9, -1.0, -1.05, 0, 0])
    assert (by_group - by_gae).tolist() == pytest.approx([0, 0, 0, 0, -1, -1, 0, 0])


@pytest.mark.parametrize(
    ("rewards", "in_batch", "in_groups"),
    [
        ([[0.0], [0.0], [0.0], [0.0]], False, False),
        ([[1.0], [1.0], [1.0], [1.0]], False, False),
        ([[0.0], [0.0], [1.0], [1.0]], True, False),  # two groups of equal outcomes
        ([[0.0], [1.0], [0.0], [0.0]], True, True),
        ([[0.0, 1.0], [1.0, 0.0], [1.0], [1.0]], False, False),  # the same sums at other times
    ],
)
def test_rewards_are_a_signal_if_they_differ_within_a_compared_group(rewards, in_batch, in_groups):
    batch = scored([trajectory(given) for given in rewards])
    group_N = torch.tensor([0, 0, 1, 1])
    assert has_signal(batch, settings(), group_N) == in_batch
    for preset in ("grpo", "mini_rl"):
        assert has_signal(batch, settings(preset=preset), group_N) == in_groups


def test_the_reward_of_a_failed_trajectory_is_no_signal_and_a_discounted_reward_is():
    batch = scored([trajectory([1.0]), trajectory([1.0]), trajectory([0.0], outcome="error")])
    assert not has_signal(batch, settings(), groups(batch))
    assert has_signal(batch, settings(gamma=0.9), groups(batch)), "earlier is better"
    zero = scored([trajectory([0.0]), trajectory([0.0])])
    assert not has_signal(zero, settings(gamma=0.9), groups(zero))


def test_distillation_has_minus_the_kl_of_each_token_and_no_reward():
    # old -1; reference -1.5, -3, -1, -0.5: k1 = 0.5, 2, 0, -0.5
    batch = replace(
        scored([trajectory([0.0, 1e9])]), reference_logprob_T=torch.tensor([-1.5, -3.0, -1.0, -0.5])
    )
    out = estimate(batch, AlgorithmConfig(preset="distil"), groups(batch))
    assert out.advantage_T.tolist() == [-0.5, -2.0, 0.0, 0.5] and out.return_T is None
    # gamma = 1/2: 0.5 + (2 + (0 - 0.5/2)/2)/2, 2 + (0 - 0.5/2)/2, 0 - 0.5/2, -0.5
    half = estimate(batch, AlgorithmConfig(preset="distil", gamma=0.5), groups(batch))
    assert half.advantage_T.tolist() == [-1.4375, -1.875, 0.25, 0.5]
    failed = scored([trajectory([0.0, 1.0], outcome="error")])
    assert (
        estimate(failed, AlgorithmConfig(preset="distil"), groups(failed)).advantage_T.tolist() == [0.0] * 4
    )
    assert has_signal(batch, AlgorithmConfig(preset="distil"), groups(batch)), "one trajectory is enough"


def test_kl_penalty_is_subtracted_at_every_action_token():
    # k1 = -1 - -3 = 2 at coefficient 0.1: minus 0.2 per token; the outcome is on the last one.
    batch = scored([trajectory([0.0, 1.0])])
    assert with_kl_penalty(batch, 0.1).tolist() == pytest.approx([-0.2, -0.2, -0.2, 0.8])
    assert with_kl_penalty(batch, 0.0) is batch.reward_T
    with pytest.raises(ValueError, match=r"kl_coefficient=0\.1 needs"):
        with_kl_penalty(replace(batch, reference_logprob_T=None), 0.1)


def test_outcome_is_the_sum_of_a_trajectorys_rewards():
    batch = to_batch([trajectory([0.5, 1.0]), trajectory([2.0])])
    assert outcomes(batch.reward_T, batch.action_offsets).tolist() == [1.5, 2.0]


def test_gae_covers_every_action_token_and_skips_observations():
    # gamma = 1/2, values 0: reward 1 on the last of 4 action tokens; the observation tokens do not count.
    batch = scored([trajectory([0.0, 1.0])])
    out = estimate(batch, settings(gamma=0.5), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert out.return_T.tolist() == pytest.approx([0.125, 0.25, 0.5, 1.0])
    turn = estimate(batch, settings(gamma=0.5, gae_level="turn"), groups(batch))
    assert turn.advantage_T.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0])


def test_the_critic_can_have_a_lambda_of_its_own():
    # 4 tokens of value 0.5, reward 1 at the last. lambda 0: (0, 0, 0, 1 - 0.5); lambda 1: returns of 1
    batch = scored([trajectory([0.0, 1.0])], value=0.5)
    out = estimate(batch, settings(lam=0.0, lam_critic=1.0), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5])
    assert out.return_T.tolist() == pytest.approx([1.0] * 4)
    same = estimate(batch, settings(lam=0.0), groups(batch))
    assert same.return_T.tolist() == pytest.approx([0.5, 0.5, 0.5, 1.0])


def test_lambda_follows_the_number_of_tokens_or_turns():
    # values 0, reward 1 at the last token, alpha 1: of 4 tokens lambda = 3/4, of 2 turns 1/2
    batch = scored([trajectory([0.0, 1.0])])
    out = estimate(batch, settings(lam_length=1.0), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([27 / 64, 9 / 16, 3 / 4, 1.0])
    turns = estimate(batch, settings(lam_length=1.0, gae_level="turn"), groups(batch))
    assert turns.advantage_T.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0])


def test_failed_trajectories_have_no_advantage_and_do_not_change_the_others():
    good, bad, failed = (
        trajectory([1.0]),
        trajectory([0.0], outcome="wrong"),
        trajectory([9.0], outcome="error"),
    )
    with_failed, without = scored([good, failed, bad]), scored([good, bad])
    for given in ({"whiten": True}, {"advantage": "group", "preset": "grpo"}):
        a = estimate(with_failed, settings(**given), groups(with_failed))
        b = estimate(without, settings(**given), groups(without))
        assert a.advantage_T[[0, 1, 4, 5]].equal(b.advantage_T)
        assert a.advantage_T[2:4].tolist() == [0.0, 0.0]


def test_whitening_gives_mean_0_and_variance_1_over_live_tokens():
    batch = scored([trajectory([1.0]), trajectory([0.0], tokens=6)])
    advantage = estimate(batch, settings(whiten=True), groups(batch)).advantage_T
    # (1, 1, 0 x 6): mean 1/4, variance 3/16
    expected = [0.75 / (3 / 16) ** 0.5] * 2 + [-0.25 / (3 / 16) ** 0.5] * 6
    assert advantage.tolist() == pytest.approx(expected, rel=1e-5)
    assert whitened(torch.ones(2), torch.zeros(2, dtype=torch.bool))[0].tolist() == [0.0, 0.0]


def test_one_failure_of_many_does_not_become_a_multiple_of_the_usual_advantage():
    # One 0 and 511 times 1: deviation 0.0442, so -22.6. Half 0 and half 1: 0.5, whatever was usual.
    failed = torch.ones(512)
    failed[0] = 0
    live, usual = torch.ones(512, dtype=torch.bool), 0.5
    alone, deviation = whitened(failed, live)
    assert alone[0] == pytest.approx(-22.6, abs=0.01) and deviation == pytest.approx(0.0442, abs=1e-4)
    assert whitened(failed, live, usual)[0][0] == pytest.approx(-511 / 512 / 0.25)
    half = torch.arange(512) % 2
    for before in (0.0, 0.5, 0.9):
        assert whitened(half.float(), live, before)[0].tolist() == pytest.approx([-1, 1] * 256)


def test_the_usual_deviation_is_the_mean_over_the_batches_that_were_whitened():
    memory = StepMemory().with_deviation(0.5).with_deviation(0.3)
    assert memory == StepMemory(deviation=pytest.approx(0.4), whitened=2)
    batch = scored([trajectory([1.0]), trajectory([0.0])])
    narrow = estimate(batch, settings(whiten=True), groups(batch), usual=4.0)
    assert narrow.deviation == pytest.approx(0.5) and narrow.advantage_T[0] == pytest.approx(0.25)
    assert estimate(batch, settings(whiten=False), groups(batch)).deviation == 0


def test_a_batch_without_reward_variance_is_not_whitened():
    # All rewards are 0.1: only the critic's noise of size 1e-3 varies, and it keeps this size.
    batch = scored([trajectory([0.1]), trajectory([0.1]), trajectory([0.1])])
    noise = 0.1 + 1e-3 * torch.randn(6, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, value_T=noise)
    advantage = estimate(batch, settings(whiten=True), groups(batch)).advantage_T
    assert advantage.abs().max() < 5e-3
    # The KL penalty varies too, but it does not decide.
    varied = replace(batch, reference_logprob_T=torch.randn(6, generator=torch.Generator().manual_seed(1)))
    advantage = estimate(varied, settings(whiten=True, kl_coefficient=1e-3), groups(batch)).advantage_T
    assert advantage.abs().max() < 2e-2


def test_group_outcomes_are_normalised_within_their_group():
    # Group 4: outcomes 0, 1 -> -1, 1. Group 7: all 2 -> 0. Group 9: alone -> 0.
    outcome = torch.tensor([0.0, 2.0, 1.0, 2.0, 5.0])
    group = torch.tensor([4, 7, 4, 7, 9])
    live = torch.ones(5, dtype=torch.bool)
    assert group_relative(outcome, group, live, normalised=True).tolist() == pytest.approx([-1, 0, 1, 0, 0])


@pytest.mark.parametrize("normalised", [True, False])
def test_outcomes_are_equal_if_their_variance_is_at_most_1e_12_of_one_plus_their_mean_square(normalised):
    def differs(*outcomes):
        outcome, one = torch.tensor(outcomes, dtype=torch.float64), torch.ones(2)
        return bool(group_relative(outcome, one, one.bool(), normalised).any())

    # Variances: 1.44e-12 and 0.81e-12; 2.5e-9 and 2.25e-6 with squares of 1e6.
    assert differs(0.0, 2.4e-6) and not differs(0.0, 1.8e-6)
    assert not differs(1000.0, 1000.0001) and differs(1000.0, 1000.003)


def test_a_small_deviation_is_not_scaled_up_to_1():
    # Deviations of 1e-4, variance 1e-8, to which 1e-8 is added.
    expected = pytest.approx([-(0.5**0.5), 0.5**0.5])
    both = torch.ones(2)
    assert group_relative(torch.tensor([0.0, 2e-4]), both, both.bool(), True).tolist() == expected
    assert whitened(torch.tensor([0.0, 2e-4]), both.bool())[0].tolist() == expected


def test_a_group_whose_first_histories_have_failed_has_no_baseline():
    first, live = torch.tensor([True, False]), torch.tensor([False, True])
    outcome, group = torch.tensor([3.0, 2.0]), torch.zeros(2)
    assert group_relative(outcome, group, live, False, first).tolist() == [0.0, 0.0]


def test_group_mean_is_a_baseline_that_is_not_divided_by_the_deviation():
    # Group 4: outcomes 0, 1, 2 minus their mean 1. Group 7: a failed trajectory is ignored: 4 and 0 minus 2.
    outcome = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.0, 9.0])
    group, live = torch.tensor([4, 4, 4, 7, 7, 7]), torch.tensor([True] * 5 + [False])
    assert group_relative(outcome, group, live, normalised=False).tolist() == [-1, 0, 1, 2, -2, 0]
    batch = replace(scored([trajectory([0.0, 1.0]), trajectory([0.0])]), value_T=None)
    out = estimate(batch, settings(preset="mini_rl"), groups(batch))
    assert out.advantage_T.tolist() == [0.5] * 4 + [-0.5] * 2 and out.return_T is None


def test_gae_includes_observations_only_if_configured():
    # Two turns of 2 and 1 tokens, 3 observation tokens between; reward 1 at the end, gamma = lambda = 1/2.
    # Values: 0, 0 | 4, 4, 4 | 0. Without observations: delta = 0, 0, 1; A = 1/16, 1/4, 1.
    turns = (Turn((5, 5), (-1.0,) * 2, (7, 7, 7), 0.0, ((0, 2),)), Turn((5,), (-1.0,), (), 1.0, ((0, 1),)))
    batch = scored([Trajectory(TASK, (1, 2), turns, "ok")])
    given = {"gamma": 0.5, "lam": 0.5}
    plain = estimate(batch, settings(**given), groups(batch))
    assert plain.advantage_T.tolist() == pytest.approx([1 / 16, 1 / 4, 1])
    assert plain.return_R is None
    # With them: delta = 0, 2, -2, -2, -4, 1 and A = delta + A'/4:
    # 1, -3.75, -2.9375, -2.734375, 1.31640625, 0.3291015625. Returns are A + V.
    batch = replace(batch, value_R=torch.tensor([0.0, 0, 4, 4, 4, 0]))
    out = estimate(batch, settings(gae_observations=True, **given), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([0.3291015625, 1.31640625, 1])
    assert out.return_T.tolist() == pytest.approx([0.3291015625, 1.31640625, 1])
    assert out.return_R.tolist() == pytest.approx(
        [0.3291015625, 1.31640625, 1.265625, 1.0625, 0.25, 1], abs=1e-6
    )


def test_the_kl_penalty_is_on_action_tokens_only_even_if_gae_includes_observations():
    # gamma = lambda = 1, values 0: A = reward to come. Each of 3 action tokens pays 0.1 * 2.
    turns = (Turn((5, 5), (-1.0,) * 2, (7, 7, 7), 0.0, ((0, 2),)), Turn((5,), (-1.0,), (), 1.0, ((0, 1),)))
    batch = scored([Trajectory(TASK, (1, 2), turns, "ok")])
    batch = replace(batch, value_R=torch.zeros(6))
    out = estimate(batch, settings(gae_observations=True, kl_coefficient=0.1), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([0.4, 0.6, 0.8])
    assert out.return_R.tolist() == pytest.approx([0.4, 0.6, 0.8, 0.8, 0.8, 0.8])


def test_group_advantage_is_on_all_action_tokens_and_needs_no_critic():
    batch = replace(scored([trajectory([0.0, 1.0]), trajectory([0.0])]), value_T=None)
    out = estimate(batch, settings(preset="grpo"), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([1, 1, 1, 1, -1, -1])
    assert out.return_T is None
    with pytest.raises(ValueError, match="advantage='gae' needs the critic's values"):
        estimate(batch, settings(), groups(batch))


def test_an_advantage_of_the_user_replaces_that_of_the_group_and_is_0_for_failed_trajectories():
    def best_of_all(outcome_N, group_N, counted_N):
        assert counted_N.tolist() == [True, True, False, False]
        return outcome_N - outcome_N[counted_N].max()

    # the third is a further history of the second episode
    played = [
        trajectory([0.0, 1.0]),
        trajectory([3.0]),
        trajectory([5.0]),
        trajectory([9.0], outcome="error"),
    ]
    batch = replace(scored(played), first_N=torch.tensor([True, True, False, True]))
    given = settings(advantage="recipe:best_of_all")
    advantages = [-2.0] * 4 + [0.0] * 2 + [2.0] * 2 + [0.0] * 2
    assert estimate(batch, given, groups(batch), best_of_all).advantage_T.tolist() == advantages
    assert has_signal(batch, given, groups(batch), best_of_all)
    assert not has_signal(batch, given, groups(batch), lambda *given: torch.zeros(4))
    with pytest.raises(ValueError, match=r"algorithm.advantage: returned \[2\] for 4 trajectories"):
        estimate(batch, given, groups(batch), lambda *given: torch.zeros(2))


def test_a_truncated_episode_counts_with_the_value_of_its_last_step_or_as_an_end_or_not_at_all():
    """Two episodes without a reward and values of 0.5, 0.8, of which the first is cut off; gamma is 0.5."""
    batch = scored([trajectory([0.0], outcome="truncated"), trajectory([0.0], outcome="wrong")])
    batch = replace(batch, value_T=torch.tensor([0.5, 0.8, 0.5, 0.8]))
    found = {
        name: estimate(batch, settings(gamma=0.5, lam=1.0, truncated=name), groups(batch))
        for name in ("bootstrap", "end", "mask")
    }
    # returns: 0.25 * 0.8 = 0.2 and 0.5 * 0.8 = 0.4; ends have none
    assert found["bootstrap"].return_T.tolist() == pytest.approx([0.2, 0.4, 0, 0])
    assert found["bootstrap"].advantage_T.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.8])
    assert found["end"].return_T.tolist() == pytest.approx([0] * 4, abs=1e-7)
    assert found["mask"].live_N.tolist() == [False, True]
    assert found["mask"].advantage_T.tolist() == pytest.approx([0, 0, -0.5, -0.8])
    assert found["end"].live_N.tolist() == found["bootstrap"].live_N.tolist() == [True, True]


def test_a_truncated_episode_at_turn_level_counts_with_the_value_of_its_last_turn():
    batch = scored([trajectory([0.0, 0.0], outcome="truncated")])
    batch = replace(batch, value_T=torch.tensor([0.5, 9.0, 0.8, 9.0]))
    out = estimate(batch, settings(gae_level="turn", truncated="bootstrap"), groups(batch))
    assert out.advantage_T.tolist() == pytest.approx([0.3, 0.3, 0.0, 0.0])


def test_a_masked_episode_does_not_count_in_the_mean_of_its_group():
    batch = scored([trajectory([1.0]), trajectory([0.0]), trajectory([0.0], outcome="truncated")])
    given = settings(preset="dr_grpo", truncated="mask")
    assert estimate(batch, given, groups(batch)).advantage_T.tolist() == pytest.approx(
        [0.5] * 2 + [-0.5] * 2 + [0] * 2
    )
