"""Old log-probs from the update's first step are those of a pass of their own, and so is everything after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.config import Config
from megatron_stppo.config.old_logprob import refusal
from tests.ranks import run_ranks
from tests.update import layouts, old_policy

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "one process, ratios of tokens, group advantages": (
        1,
        {},
        {"segments": "token", "advantage": "group", "kl_coefficient": 0},
    ),
    "tensor": (2, {"tensor": 2, "sequence": True}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "data": (2, {}, {"gae_observations": True}),
    "context": (2, {"context": 2}, {"segments": "sequence"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder)
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_both_sources_of_old_log_probs_train_the_same_bit_for_bit(
    name: str, model: str, tmp_path: Path
) -> None:
    ranks, parallel, algorithm = CASES[name]
    for found in run_ranks(old_policy.iterations, ranks, model, parallel, algorithm, str(tmp_path)):
        scored, updated = found["score"], found["update"]
        assert (scored.pop("scored"), updated.pop("scored")) == ([True] * 2, [False] * 2)
        assert repr(scored) == repr(updated)  # NaN equals NaN, 0.0 is not -0.0
        assert updated["rows"][0]["actor/first_kl_to_old"] == 0
        assert updated["rows"][1]["actor/kl_to_old"] > 0  # of the second epoch


def config(update: dict[str, Any], algorithm: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "update": update, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("update", "algorithm", "setting"),
    [
        ({"minibatches": 2}, {"kl_coefficient": 0}, "update.minibatches=2"),
        ({}, {"kl_coefficient": 0.1}, "algorithm.kl_in=reward with algorithm.kl_coefficient=0.1"),
        ({}, {"kl_coefficient": 0, "mismatch": "mask"}, "algorithm.mismatch=mask"),
        ({}, {"kl_coefficient": 0, "routing_replay": "old_policy"}, "algorithm.routing_replay=old_policy"),
    ],
)
def test_a_setting_that_reads_old_log_probs_earlier_is_named_and_auto_then_scores(
    update: dict[str, Any], algorithm: dict[str, Any], setting: str
) -> None:
    asked = config({"minibatches": 1} | update | {"old_logprob": "update"}, algorithm)
    refused = refusal(asked.update, asked.algorithm)
    assert refused is not None and refused.startswith(f"update.old_logprob=update: {setting}: ")
    auto = config({"minibatches": 1} | update, algorithm)
    assert auto.scores_actor and refusal(auto.update, auto.algorithm) is None


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl_coefficient": 0},
        {"kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1},
        {"kl_coefficient": 0, "routing_replay": "rollout"},
    ],
)
def test_auto_leaves_the_actors_score_out_with_one_step_per_epoch(algorithm: dict[str, Any]) -> None:
    assert not config({"minibatches": 1, "epochs": 3}, algorithm).scores_actor
    assert config({"minibatches": 1, "old_logprob": "score"}, algorithm).scores_actor
