"""Old log-probs from the update's first step are those of a pass of their own, and so is everything after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.config import Config
from megatron_stppo.config.update import rules
from tests.ranks import run_ranks
from tests.training.update import lagging, layouts, old_policy

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


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("one process", "tensor", "context") else pytest.param(name, marks=pytest.mark.long)
        for name in CASES
    ],
)
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


@pytest.fixture(scope="module")
def lagged(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of 16 turns in 8 trajectories, the version before wrote the first 8, of one its first half."""
    folder = str(tmp_path_factory.mktemp("lagging"))
    return run_ranks(lagging.updates, 1, model, folder)[0]  # type: ignore[no-any-return]


def test_the_old_policy_is_that_of_the_iterations_start_or_that_of_the_engine(lagged: dict[str, Any]) -> None:
    """Every log-prob has risen by 0.1 since the version before: ratios of e^0.1, and of e^0.05 if half of the
    turn is older."""
    ratios, row = lagged["score"]
    assert ratios == [1.0] * 16
    assert row["actor/first_kl_to_old"] == 0
    assert row["mismatch/mean_abs"] == pytest.approx(0.1 * 27 / 50, abs=1e-5)  # 50 of 60 tokens are live
    ratios, row = lagged["behaviour"]
    before = [math.exp(0.1)] * 5 + [math.exp(0.05)] + [math.exp(0.1)] * 2
    assert ratios == pytest.approx(before + [1.0] * 8, abs=1e-5)
    assert row["mismatch/mean_abs"] == 0
    assert row["actor/first_kl_to_old"] > 0


@pytest.mark.parametrize("source", ["score", "behaviour"])
def test_engine_and_trainer_are_compared_with_either_old_policy(lagged: dict[str, Any], source: str) -> None:
    found = [lagged[name + source][1]["mismatch/current_mean_abs"] for name in ("", "broken ")]
    assert found == pytest.approx([0.0, 0.5], abs=1e-5)


@pytest.mark.parametrize(
    ("update", "algorithm", "setting"),
    [
        ({"old_logprob": "score"}, {}, "update.old_logprob=score"),
        ({}, {"mismatch": "truncate"}, "algorithm.mismatch=truncate"),
        ({}, {"preset": "mini_rl"}, "algorithm.mismatch=truncate"),
        ({}, {"routing_replay": "old_policy"}, "algorithm.routing_replay=old_policy"),
    ],
)
def test_the_engines_policy_as_old_policy_excludes_what_needs_a_score(
    update: dict[str, Any], algorithm: dict[str, Any], setting: str
) -> None:
    asked = config(update, algorithm | {"old_policy": "behaviour"})
    refused = refusal(asked)
    assert refused is not None and refused.startswith(f"algorithm.old_policy=behaviour: {setting}: ")
    kept = config({}, {"old_policy": "behaviour", "routing_replay": "rollout"})
    assert refusal(kept) is None and not kept.scores_actor


def refusal(given: Config) -> str | None:
    return next((str(rule) for rule in rules(given.update, given.algorithm) if rule.broken), None)


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
    refused = refusal(asked)
    assert refused is not None and refused.startswith(f"update.old_logprob=update: {setting}: ")
    auto = config({"minibatches": 1} | update, algorithm)
    assert auto.scores_actor and refusal(auto) is None


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
