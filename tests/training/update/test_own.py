"""Losses in place of the built-in surrogate, and presets in which nothing is clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stppo import ops
from megatron_stppo.algorithm.own import check_loss
from megatron_stppo.training.update.own import own_surrogate
from tests.ranks import run_ranks
from tests.training.update import layouts, whole


def ppo(logprob_T, old_logprob_T, advantage_T, offsets):
    log_T = logprob_T - old_logprob_T
    if offsets is not None:
        log_T = torch.cat([part.mean().expand(len(part)) for part in log_T.tensor_split(offsets[1:-1])])
    ratio_T = log_T.exp()
    return -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.2) * advantage_T)


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 3, 4, 9, 12])])
def test_objective_gradient_and_divergence_are_those_of_the_built_in_surrogate(offsets) -> None:
    check_loss(ppo)
    generator = torch.Generator().manual_seed(1)
    logprob_T, noise_T, advantage_T = (torch.randn(12, generator=generator) for _ in range(3))
    old_T, weight_T = logprob_T + noise_T, torch.full((12,), 0.1)
    old_T[:3], advantage_T[:3] = logprob_T[:3] - 0.5, 1  # clipped
    weight_T[9:] = 0  # a failed trajectory
    old_T[9:] = advantage_T[9:] = torch.nan
    found, gradients = [], []
    for surrogate in (
        lambda new_T: ops.clipped_surrogate(new_T, old_T, advantage_T, offsets, weight=weight_T),
        lambda new_T: own_surrogate(ppo, new_T, old_T, advantage_T, weight_T, offsets),
    ):
        new_T = logprob_T.clone().requires_grad_()
        found.append(surrogate(new_T))
        found[-1].objective.backward()
        gradients.append(new_T.grad)
    built_in, own = found
    for name in ("objective", "kl_k1", "kl_k3", "tokens"):
        assert getattr(own, name).item() == pytest.approx(getattr(built_in, name).item(), rel=1e-5), name
    assert gradients[1].tolist() == pytest.approx(gradients[0].tolist(), abs=1e-6)
    assert gradients[0][:3].tolist() == [0, 0, 0]
    assert (own.clipped, own.clip_fraction) == (0, 0)


def test_a_result_of_another_length_ends_the_step() -> None:
    one_T = torch.ones(4)
    with pytest.raises(ValueError, match=r"algorithm.loss: returned \[2\] for 4 tokens"):
        own_surrogate(lambda new_T, *_: new_T[:2], one_T, one_T, one_T, one_T, None)


def test_tokens_of_failed_trajectories_alone_add_nothing() -> None:
    dead_T, new_T = torch.zeros(2), torch.full((2,), -1.0, requires_grad=True)
    found = own_surrogate(ppo, new_T, torch.full((2,), torch.nan), dead_T, dead_T, None)
    assert (found.objective.item(), found.kl_k3.item(), found.tokens.item()) == (0, 0, 0)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "cispo": {"preset": "cispo"},
    "dppo": {"preset": "dppo", "select_bound": 1e-3},
    "controlled": {"preset": "st_ppo", "rate": "open_loop", "rate_profile": [0.5, 1]},
    "kl": {"preset": "kl", "rate_kl": 1e-6},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows of an update with each algorithm."""
    folder = tmp_path_factory.mktemp("own")
    layouts.write_model(folder / "hf", num_hidden_layers=1)
    given = (str(folder / "hf"), str(folder), list(ALGORITHMS.values()))
    (found,) = run_ranks(whole.one_update_each, 1, *given)
    return dict(zip(ALGORITHMS, found, strict=True))


@pytest.mark.parametrize("preset", ["cispo", "dppo"])
def test_presets_without_clipping_make_an_update(rows: dict[str, dict[str, Any]], preset: str) -> None:
    row = rows[preset]
    assert row["actor/clip_fraction"] == 0 and row["actor/correction_scale"] == 1
    assert row["actor/skipped"] == 0 and row["actor/kl_after"] > 0
    if preset == "dppo":  # the first step has moved probabilities by more than the bound
        assert row["actor/selected"] < 1
    else:
        assert row["actor/selected"] == 1
    assert "actor/removed_share" not in row and row["actor/effective_share"] == 1


def test_shares_are_means_over_the_steps_that_clipping_or_the_controller_could_change(
    rows: dict[str, dict[str, Any]],
) -> None:
    """Of two steps the controller sets the rate of both. The first clips nothing: its ratios are 1."""
    row = rows["controlled"]
    removed, second = row["actor/removed_share"], 2 * row["actor/correction_scale"] - 1
    assert 0 < removed < 1 and second == pytest.approx(1 / max(1, 10 * removed / (1 - removed)))
    assert row["actor/effective_share"] == pytest.approx((0.5 + second) / 2)
    assert rows["kl"]["actor/effective_share"] == pytest.approx((1 + 1 / 1.5) / 2)
