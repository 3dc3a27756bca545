"""The limit of the difference between the log-probs of engine and trainer."""

from __future__ import annotations

import math

import pytest

from megatron_stppo.config import Config
from megatron_stppo.training.loop import _check
from megatron_stppo.weights.reshard.verify import ReshardError


def limited(top_p: float) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "rollout": {"top_p": top_p, "max_mismatch": 0.1}})


def test_nucleus_sampling_raises_the_limit_by_what_it_explains_and_no_more() -> None:
    """With top_p=0.8 the engine's log-probs are up to -log(0.8) = 0.223 nats above the trainer's."""
    _check(limited(0.8), {"mismatch/current_mean_abs": 0.32})
    with pytest.raises(ReshardError) as error:
        _check(limited(0.8), {"mismatch/current_mean_abs": 0.33})
    assert str(error.value) == (
        "engine and trainer disagree by 0.33 nats per token (rollout.top_p=0.8 explains up to 0.223), "
        "rollout.max_mismatch=0.1; the engine uses other weights or another precision than the trainer"
    )


def test_without_nucleus_sampling_the_limit_is_the_configured_one() -> None:
    for row in ({}, {"mismatch/current_mean_abs": 0.1}, {"mismatch/current_mean_abs": math.nan}):
        _check(limited(1.0), row)
    with pytest.raises(ReshardError, match=r"by 0\.101 nats per token, rollout\.max_mismatch=0\.1;"):
        _check(limited(1.0), {"mismatch/current_mean_abs": 0.101})
