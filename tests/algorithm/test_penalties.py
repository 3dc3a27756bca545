import math

import pytest
import torch

from megatron_stppo.algorithm.penalties import clipped_value_loss, kl, mismatch_weight, overlong, weighted_sum


def test_kl_estimators_match_a_hand_calculation():
    # log pi = ln 1/2, log ref = ln 1/4: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2
    logprob, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert kl("k1", logprob, reference).item() == pytest.approx(math.log(2))
    assert kl("k2", logprob, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl("k3", logprob, reference).item() == pytest.approx(math.log(2) - 0.5)


def test_the_penalty_of_a_long_episode_rises_between_two_lengths():
    # equation 13 of DAPO with L_max = 200 and L_cache = 100, times 0.5
    length = torch.tensor([0, 100, 101, 150, 200, 300])
    assert overlong(length, 100, 200, 0.5).tolist() == pytest.approx([0, 0, 0.005, 0.25, 0.5, 0.5])


def test_k1_and_k3_average_to_the_kl_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy * kl(estimator, policy.log(), reference.log())).sum(), exact)


def test_on_policy_the_gradient_of_k3_is_that_of_the_kl_from_the_reference_to_the_policy():
    """The samples' probabilities are constants, as in a loss over sampled tokens."""
    reference, logits = torch.tensor([0.2, 0.2, 0.6]), torch.tensor([0.5, 0.3, 0.2]).log().requires_grad_()
    policy = logits.softmax(0)
    (sampled,) = torch.autograd.grad(
        (policy.detach() * kl("k3", policy.log(), reference.log())).sum(), logits, retain_graph=True
    )
    (reverse,) = torch.autograd.grad((reference * (reference / policy).log()).sum(), logits)
    torch.testing.assert_close(sampled, reverse)


def test_k3_is_finite_if_the_reference_is_much_more_likely():
    assert kl("k3", torch.tensor([-200.0]), torch.tensor([0.0])).isfinite()


def test_clipped_value_loss_matches_a_hand_calculation():
    # Old value 0, clip 0.5. V = 1, R = 1: max(0, (0.5-1)^2)/2 = 1/8. V = 0.3, R = 1: inside, 0.49/2.
    # V = 1, R = 0: max(1, 0.25)/2 = 1/2. V = R = -1: as the first. Gradients V - R where the unclipped error
    # is the larger, else 0.
    value = torch.tensor([1.0, 0.3, 1.0, -1.0], requires_grad=True)
    loss_T = clipped_value_loss(value, torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, -1.0]), 0.5)
    assert loss_T.tolist() == pytest.approx([0.125, 0.245, 0.5, 0.125])
    loss_T.sum().backward()
    assert value.grad.tolist() == pytest.approx([0.0, -0.7, 1.0, 0.0])


def test_value_loss_is_the_same_in_two_microbatches_as_in_one():
    value, old, returns = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.full_like(value, 1 / 10)

    def loss(part):
        return weighted_sum(clipped_value_loss(value[part], old[part], returns[part], 0.5), weight[part])

    torch.testing.assert_close(loss(slice(0, 3)) + loss(slice(3, 10)), loss(slice(0, 10)))


def test_weighted_sum_selects_instead_of_multiplying_by_zero():
    value = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    total = weighted_sum(value, torch.tensor([0.5, 0.0, 0.25]))
    assert total.item() == 2.0
    total.backward()
    assert value.grad.tolist() == [0.5, 0.0, 0.25]


def test_mismatch_weight_truncates_or_masks_at_each_level():
    # Trainer over engine: 4, 1 | 1/4. Bound 2.
    old, rollout = torch.tensor([4.0, 1.0, 0.25]).log(), torch.zeros(3)
    turn = torch.tensor([0, 2, 3])
    weight, raw = mismatch_weight("truncate", old, rollout, None, 2.0)
    assert weight.tolist() == pytest.approx([2, 1, 0.25])
    assert raw.tolist() == pytest.approx([4, 1, 0.25])
    assert mismatch_weight("mask", old, rollout, None, 2.0)[0].tolist() == pytest.approx([0, 1, 0])
    on_bounds = torch.tensor([2.0, 0.5]).log()
    assert mismatch_weight("mask", on_bounds, torch.zeros(2), None, 2.0)[0].tolist() == [2, 0.5]
    # Turns: sqrt(4 * 1) = 2 and 1/4. The sequence: (4 * 1 * 1/4)^(1/3) = 1.
    assert mismatch_weight("mask", old, rollout, turn, 3.0)[0].tolist() == pytest.approx([2, 2, 0])
    assert mismatch_weight("truncate", old, rollout, torch.tensor([0, 3]), 2.0)[0].tolist() == pytest.approx(
        [1] * 3
    )


def test_a_product_of_ratios_and_a_mask_with_two_bounds():
    """Trainer over engine: 4, 1 | 1/4, in turns. Products: 4 and 1/4, in the sequence 1."""
    old, rollout = torch.tensor([4.0, 1.0, 0.25]).log(), torch.zeros(3)
    turn, sequence = torch.tensor([0, 2, 3]), torch.tensor([0, 3])
    product = mismatch_weight("truncate", old, rollout, turn, 9.0, pooling="sum")[0]
    assert product.tolist() == pytest.approx([4, 4, 0.25])
    assert mismatch_weight("truncate", old, rollout, sequence, 9.0, pooling="sum")[0].tolist() == [1] * 3
    masked = mismatch_weight("mask", old, rollout, turn, 5.0, lower=0.5, pooling="sum")[0]
    assert masked.tolist() == pytest.approx([4, 4, 0])
    assert mismatch_weight("mask", old, rollout, None, 3.0, lower=0.2)[0].tolist() == pytest.approx(
        [0, 1, 0.25]
    )


def test_unknown_kinds_are_named():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="kl_estimator='k4'"):
        kl("k4", one, one)
    with pytest.raises(ValueError, match="mismatch='clip'"):
        mismatch_weight("clip", one, one, None, 2.0)
