from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.update import applied, layouts

# ||C|| is below 2
HALVED = {
    "preset": "st_ppo",
    "correction": "gradient",
    "correction_unit": "mean",
    "correction_strength": 1,
    "correction_floor": 2.0,
}
# with the weights and the bounds of turn_ppo, to compare the two
PRINTED = {"preset": "paper", "aggregation": "token_mean", "clip_length_power": 0.5, "dual_clip": 3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "turn_ppo": {"preset": "turn_ppo"},
    "step": {**HALVED, "correction_apply": "step"},
    "gradient": {**HALVED, "correction_apply": "gradient"},
    "paper": PRINTED,
    "relative": {**PRINTED, "correction_unit": "relative"},
    "stronger": {**PRINTED, "correction_unit": "relative", "correction_strength": 10},
    "st_ppo": {"preset": "st_ppo"},
    "probed": {"preset": "st_ppo", "correction_probe": True},
    "open_loop": {"preset": "turn_ppo", "rate": "open_loop", "rate_profile": [0.25]},
    "both": {**HALVED, "rate": "open_loop", "rate_profile": [0.25]},
    "sums": {"preset": "turn_ppo", "aggregation": "sequence_mean_token_sum"},
    "short": {"preset": "turn_ppo"},
    "wide": {"preset": "turn_ppo", "clip_low": 0.99, "clip_high": 1000.0, "clip_length_power": 0},
    "whole": {"preset": "turn_ppo", "clip_decision": "segment"},
    "wide and whole": {
        "preset": "turn_ppo",
        "clip_low": 0.99,
        "clip_high": 1000.0,
        "clip_length_power": 0,
        "clip_decision": "segment",
    },
    "whole and exact": {
        **PRINTED,
        "dual_clip": None,
        "correction_apply": "step",
        "clip_decision": "segment",
    },
    "unbounded": {
        "preset": "turn_ppo",
        "clip_low": 0.99,
        "clip_high": 1000.0,
        "clip_length_power": 0,
        "dual_clip": None,
    },
    "products": {"preset": "turn_ppo", "pooling": "sum", "clip_length_power": 0},
    "entropy": {"preset": "turn_ppo", "entropy_coefficient": 0.01},
    "twice the entropy": {"preset": "turn_ppo", "entropy_coefficient": 0.02},
    "kl": {"preset": "turn_ppo", "kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1},
    "twice the kl": {"preset": "turn_ppo", "kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.2},
}
GRAD_CLIPS = {"short": 0.5}  # the others: no clipping by norm


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, float], Any, Any]]:
    """Return {name: (numbers, gradient, change of the weights)}."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder, num_hidden_layers=1)
    (found,) = run_ranks(applied.first_steps, 1, str(folder), ALGORITHMS, GRAD_CLIPS)
    return {name: (numbers, torch.tensor(g), torch.tensor(d)) for name, (numbers, g, d) in found.items()}


def test_a_gradient_longer_than_grad_clip_is_shortened_to_it(steps: Any) -> None:
    (plain, gradient, _), (numbers, shortened, _) = steps["turn_ppo"], steps["short"]
    norm = float(gradient.norm())
    assert norm > 0.5 and numbers["actor/gradient_norm"] == plain["actor/gradient_norm"] == pytest.approx(
        norm
    )
    torch.testing.assert_close(shortened, gradient * 0.5 / norm, rtol=1e-5, atol=1e-9)


def test_applied_to_the_step_the_scale_shortens_the_step_and_not_the_gradient(steps: Any) -> None:
    (_, gradient, moved), (numbers, same, halved) = steps["turn_ppo"], steps["step"]
    assert numbers["actor/correction_scale"] == 0.5
    assert numbers["actor/scaled_gradient_norm"] == numbers["actor/gradient_norm"]
    torch.testing.assert_close(same, gradient)
    assert float(moved.abs().sum()) > 0
    torch.testing.assert_close(halved, moved / 2, atol=1e-7, rtol=1e-3)  # a weight's rounding


def test_applied_to_the_gradient_the_scale_is_undone_by_the_first_step_of_adam(steps: Any) -> None:
    (_, gradient, moved), (numbers, halved, same) = steps["turn_ppo"], steps["gradient"]
    assert numbers["actor/correction_scale"] == 0.5
    assert numbers["actor/scaled_gradient_norm"] == pytest.approx(numbers["actor/gradient_norm"] / 2)
    torch.testing.assert_close(halved, gradient / 2)
    assert float((same - moved).abs().sum()) < 1e-2 * float(moved.abs().sum())


def test_the_papers_form_divides_by_the_exact_norm_whatever_its_size(steps: Any) -> None:
    (plain, gradient, _), (numbers, divided, _) = steps["turn_ppo"], steps["paper"]
    norm = numbers["actor/clipping_bias_gradient"]
    assert 0 < norm < 2, "a floor of 2 would have halved the gradient"
    assert numbers["actor/clipping_bias"] == norm
    assert numbers["actor/correction_scale"] == pytest.approx(1 / norm)
    torch.testing.assert_close(divided, gradient / norm)
    assert plain["actor/correction_scale"] == 1 and plain["actor/clipping_bias"] == 0


def test_the_advantage_of_a_turn_decides_what_is_clipped_and_nothing_else(steps: Any) -> None:
    (plain, gradient, _), (numbers, other, _) = steps["turn_ppo"], steps["whole"]
    assert numbers["actor/clip_fraction"] != plain["actor/clip_fraction"] and not torch.equal(other, gradient)
    (_, unclipped, _), (wide, same, _) = steps["wide"], steps["wide and whole"]
    assert wide["actor/clip_fraction"] == 0
    torch.testing.assert_close(same, unclipped, rtol=1e-4, atol=1e-7)


def test_the_second_pass_computes_what_clipping_by_the_advantage_of_a_turn_has_removed(steps: Any) -> None:
    (_, unclipped, _), (numbers, kept, _) = steps["unbounded"], steps["whole and exact"]
    assert numbers["actor/clipping_bias_gradient"] == pytest.approx(
        float((unclipped - kept).norm()), rel=1e-3
    )


def test_the_strength_multiplies_the_bias(steps: Any) -> None:
    (once, _, _), (numbers, _, _) = steps["relative"], steps["stronger"]
    assert numbers["actor/clipping_bias"] == once["actor/clipping_bias"] > 0
    assert numbers["actor/correction_scale"] == pytest.approx(once["actor/correction_scale"] / 10)


def test_the_probe_does_not_change_the_step(steps: Any) -> None:
    (plain, gradient, moved), (probed, same, alike) = steps["st_ppo"], steps["probed"]
    assert probed.pop("actor/clipping_bias_gradient") > 0
    assert probed == plain and torch.equal(same, gradient) and torch.equal(alike, moved)


def test_relative_to_the_gradient_divides_by_the_share_that_clipping_took(steps: Any) -> None:
    (_, gradient, _), (paper, _, _), (numbers, divided, _) = (
        steps[name] for name in ("turn_ppo", "paper", "relative")
    )
    share = paper["actor/clipping_bias_gradient"] / paper["actor/gradient_norm"]
    assert numbers["actor/clipping_bias_gradient"] == pytest.approx(share)
    torch.testing.assert_close(divided, gradient / share)


def test_sums_over_trajectories_change_the_loss_but_neither_means_nor_c_in_the_unit_of_sums(
    steps: Any,
) -> None:
    """Every token has the weight 1/7, for 7 live trajectories, instead of 1/N."""
    (mean, gradient, _), (total, larger, _) = steps["turn_ppo"], steps["sums"]
    batch = layouts.batch(same=0)
    factor = int(batch.live_T.sum()) / 7
    torch.testing.assert_close(larger, gradient * factor, rtol=1e-4, atol=1e-6)
    assert total["actor/objective"] == pytest.approx(mean["actor/objective"] * factor, rel=1e-4)
    for same in ("entropy", "clip_fraction", "kl_to_old", "clipping_bias_logit", "clipping_bias_coefficient"):
        assert total[f"actor/{same}"] == pytest.approx(mean[f"actor/{same}"], rel=1e-4), same
    assert mean["actor/clipping_bias_logit"] > 0, "reported without a correction too"


def test_the_rates_factor_shortens_the_step_on_top_of_the_correction(steps: Any) -> None:
    (plain, gradient, moved), (numbers, same, quarter) = steps["turn_ppo"], steps["open_loop"]
    torch.testing.assert_close(same, gradient)
    torch.testing.assert_close(quarter, moved / 4, atol=1e-7, rtol=1e-3)
    both, lr = steps["both"][0], layouts.SETTINGS["lr"]
    assert (plain["actor/rate_scale"], plain["actor/effective_lr"]) == (1, lr)
    assert (numbers["actor/rate_scale"], numbers["actor/effective_lr"]) == (0.25, lr / 4)
    assert (both["actor/rate_scale"], both["actor/effective_lr"]) == (0.25, lr / 8)


@pytest.mark.parametrize("term", ["entropy", "kl"])
def test_a_term_of_the_loss_is_proportional_to_its_coefficient(steps: Any, term: str) -> None:
    once, twice = (steps[name][1] - steps["turn_ppo"][1] for name in (term, f"twice the {term}"))
    assert float(once.norm()) > 1e-4 * float(steps["turn_ppo"][1].norm())
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-7)


def test_the_step_has_the_bounds_and_the_pooling_that_are_configured(steps: Any) -> None:
    (plain, gradient, _), (wide, _, _) = steps["turn_ppo"], steps["wide"]
    assert plain["actor/clip_fraction"] > 0 and wide["actor/clip_fraction"] == 0
    assert plain["actor/clipping_bias_logit"] > 0 and wide["actor/clipping_bias_logit"] == 0
    assert not torch.allclose(steps["products"][1], gradient)
