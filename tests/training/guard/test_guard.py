"""Spikes, what UpdateGuard makes of iterations in which no step of the actor was applied, and the limit of
the difference between the log-probs of engine and trainer."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from megatron_stppo.config import Config
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.training.guard import guard
from megatron_stppo.training.guard.guard import Spikes
from megatron_stppo.weights.reshard.resharder import ReshardError

HELD = {"actor/held": 1.0, "actor/objective": 0.0, "actor/gradient_norm": 0.05}
APPLIED = {
    "actor/held": 0.0,
    "actor/lr": 0.0,
    "actor/objective": 3.0,
    "actor/gradient_norm": 8.0,
    "actor/clip_fraction": 0.0,
    "actor/correction_scale": 1.0,
    "critic/explained_variance": 0.0,
}
CONFIG = Config.model_validate({"model": {"path": "m"}, "run": {"dump": "none", "spike_window": 8}})
MESH = MeshRank(0, 1, *(0, 1) * 4, layout=Layout())
BATCH: Any = None  # a guard without dumps reads no batch


@pytest.fixture
def guarded(world_of_one: None) -> guard.UpdateGuard:
    """The guard of a run of one process, without models."""
    saver: Any = None
    return guard.UpdateGuard(CONFIG, MESH, {}, saver)


def test_steps_that_were_not_applied_are_no_spikes_and_later_ones_are_not_compared_with_them(
    guarded: guard.UpdateGuard,
) -> None:
    rows = [HELD] * 8 + [APPLIED] * 8 + [HELD | {"actor/gradient_norm": 1e6}]
    found = [guarded.look(n, row, BATCH, torch.zeros(0)) for n, row in enumerate(rows, start=1)]
    assert {x["fault/spikes"] for x in found} == {0}
    assert (
        guarded.look(18, APPLIED | {"actor/gradient_norm": 1e6}, BATCH, torch.zeros(0))["fault/spikes"] == 1
    )


def test_the_advice_depends_on_what_was_not_finite() -> None:
    assert guard.remedy(["old_logprob_T: 1 of 4 not finite"], applied=True).startswith(
        "lower update.actor.lr"
    )
    assert guard.remedy(["old_logprob_T: 1 of 4 not finite"], applied=False).startswith(
        "no step was applied, so"
    )
    assert guard.remedy(["reward_T: 1 of 4 not finite"], applied=False).startswith("the environment returned")


def test_the_warning_says_why_no_step_was_applied(
    guarded: guard.UpdateGuard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        guarded.look(1, HELD, BATCH, torch.zeros(0), hold=True)
        guarded.look(2, HELD, BATCH, torch.zeros(0))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("iteration 1: rewards do not vary, so the actor is not updated; look at")
    assert second == (
        "iteration 2: no token carries loss, so the actor is not updated, 2 iterations in a row; look at the "
        "outcomes of the episodes; algorithm.mismatch=mask can remove all tokens"
    )


NAME = "actor/gradient_norm"


def watched(*past: float) -> Spikes:
    spikes = Spikes(window=8, deviations=10)
    for value in past:
        assert spikes.look({NAME: value}) == []
    return spikes


def test_a_value_ten_deviations_above_the_median_is_a_spike() -> None:
    """After 10, 12, 8, 14, 6: median 10, median absolute deviation 2, bound 10 + 10 * 1.4826 * 2 = 39.652."""
    (spike,) = watched(10, 12, 8, 14, 6).look({NAME: 39.7})
    assert spike == "actor/gradient_norm=39.7 exceeds 39.65"
    assert watched(10, 12, 8, 14, 6).look({NAME: 39.6}) == []


def test_the_sign_of_the_objective_does_not_matter() -> None:
    spikes = Spikes(window=8, deviations=10)
    for value in (2.0, -2.0, 2.0, -2.0):
        spikes.look({"actor/objective": value})
    assert len(spikes.look({"actor/objective": -4.1})) == 1  # 2 + 10 * 0.1 * 2 = 4


def test_no_value_is_a_spike_before_half_a_window_is_recorded() -> None:
    assert watched(1, 1, 1).look({NAME: 1e9}) == []
    assert len(watched(1, 1, 1, 1).look({NAME: 1e9})) == 1


def test_the_first_rewards_are_no_spike() -> None:
    assert watched(0, 0, 0, 0, 0).look({NAME: 0.9}) == []


def test_one_spike_does_not_hide_the_next_and_a_lasting_change_becomes_the_new_normal() -> None:
    spikes = watched(2, 2, 2, 2, 2, 2)
    assert [len(spikes.look({NAME: 50})) for _ in range(6)] == [1, 1, 1, 1, 0, 0]


def test_values_that_are_missing_or_not_finite_are_skipped() -> None:
    spikes = watched(2, 2, 2, 2)
    assert spikes.look({NAME: math.nan}) == spikes.look({NAME: math.inf}) == spikes.look({}) == []
    assert len(spikes.look({NAME: 50})) == 1


def test_a_restored_state_gives_the_same_results() -> None:
    spikes, again = watched(2, 2, 2, 2), Spikes(window=8, deviations=10)
    again.restore(spikes.state())
    assert again.look({NAME: 50}) == spikes.look({NAME: 50}) != []


def limited(top_p: float) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "rollout": {"top_p": top_p, "max_mismatch": 0.1}})


def test_nucleus_sampling_raises_the_limit_by_what_it_explains_and_no_more() -> None:
    """With top_p=0.8 the engine's log-probs are up to -log(0.8) = 0.223 nats above the trainer's."""
    guard.check_mismatch(limited(0.8), {"mismatch/current_mean_abs": 0.32})
    with pytest.raises(ReshardError) as error:
        guard.check_mismatch(limited(0.8), {"mismatch/current_mean_abs": 0.33})
    assert str(error.value) == (
        "engine and trainer disagree by 0.33 nats per token (rollout.top_p=0.8 explains up to 0.223), "
        "rollout.max_mismatch=0.1; the engine uses other weights or another precision than the trainer"
    )


def test_without_nucleus_sampling_the_limit_is_the_configured_one() -> None:
    for row in ({}, {"mismatch/current_mean_abs": 0.1}, {"mismatch/current_mean_abs": math.nan}):
        guard.check_mismatch(limited(1.0), row)
    with pytest.raises(ReshardError, match=r"by 0\.101 nats per token, rollout\.max_mismatch=0\.1;"):
        guard.check_mismatch(limited(1.0), {"mismatch/current_mean_abs": 0.101})
