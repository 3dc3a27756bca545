from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import Config
from megatron_stppo.data.packing import to_batch
from megatron_stppo.observe import throughput as flop_of
from megatron_stppo.observe.throughput import forward_flop, phase_flop, throughput
from megatron_stppo.weights.sharding.hf_names import ModelShape

# 144 weights in its layer, a head of 4 x 10.
SHAPE = ModelShape("", 1, 4, 2, 1, 2, 8, 10, False, 1e4, 1e-6, 64)
SECONDS = {"rollout": 2.0, "score": 1.0, "update": 4.0}


def settings(**algorithm: float | str) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "update": {"epochs": 2}, "algorithm": algorithm})


def batch():
    """Return one trajectory: a prompt of 1 token, then 2 action tokens."""
    turn = Turn((5, 6), (-0.5, -0.5), (), 1.0, ((0, 2),))
    return to_batch([Trajectory(Task("", (), ("",), "train", 0), (3,), (turn,), "ok")])


def test_a_forward_pass_takes_two_flop_per_weight_and_token_and_attention_sees_half() -> None:
    assert forward_flop(SHAPE, [3]) == 2 * 144 * 3 + 2 * 4 * 9 == 936
    assert forward_flop(SHAPE, [3, 3], head_tokens=2) == 2 * 936 + 2 * 2 * 40


def test_only_the_experts_of_a_token_and_the_router_are_counted() -> None:
    sparse = ModelShape("", 1, 4, 2, 1, 2, 8, 10, False, 1e4, 1e-6, 64, experts=6, experts_per_token=2)
    assert forward_flop(sparse, [1]) - forward_flop(SHAPE, [1]) == 2 * (3 * 32 + 4 * 6)


def test_every_model_scores_once_and_two_models_train_in_every_epoch() -> None:
    policy, critic = 936 + 160, 936
    assert phase_flop(settings(), SHAPE, batch()) == {
        "score": 2 * policy + critic,  # with the reference
        "update": 3 * 2 * (policy + critic),
    }
    alone = settings(preset="grpo", kl_coefficient=0)
    assert phase_flop(alone, SHAPE, batch()) == {"score": policy, "update": 3 * 2 * policy}


def test_frozen_weights_take_two_of_three_products_and_adapters_three() -> None:
    given = settings()
    lora = given.model.lora.model_copy(update={"rank": 1, "targets": ("q_proj",)})
    given = given.model_copy(update={"model": given.model.model_copy(update={"lora": lora})})
    attention, adapter = 2 * 4 * 9, 2 * (4 + 4) * 3
    assert phase_flop(given, SHAPE, batch()) == {
        "score": 2 * 1096 + 936 + 2 * adapter,  # the reference has none
        "update": 2 * (2 * (1096 + 936 - 2 * attention) + 3 * 2 * (attention + adapter)),
    }
    imported = given.model.model_copy(update={"lora": lora.model_copy(update={"path": Path("adapter")})})
    scored = phase_flop(given.model_copy(update={"model": imported}), SHAPE, batch())["score"]
    assert scored == 2 * 1096 + 936 + 3 * adapter


def test_a_teacher_scores_with_the_flop_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings()
    model = given.model.model_copy(update={"reference_path": Path("teacher")})
    monkeypatch.setattr(flop_of, "_shape_of", lambda folder: replace(SHAPE, layers=2 * SHAPE.layers))
    scored = phase_flop(given.model_copy(update={"model": model}), SHAPE, batch())["score"]
    assert scored == 1096 + (2 * 936 + 160) + 936


def test_mfu_is_reported_if_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    row = throughput(settings(), SHAPE, batch(), SECONDS.__getitem__, world=2)
    assert row["rollout/tokens_per_second"] == 1.0
    assert row["update/tokens_per_second"] == 2 * 3 / 4
    assert row["mfu/update"] == pytest.approx(3 * 2 * (1096 + 936) / (4 * 2 * 989e12))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Unheard Of")
    assert "mfu/update" not in throughput(settings(), SHAPE, batch(), SECONDS.__getitem__, world=2)


def test_a_cpu_has_no_mfu() -> None:
    row = throughput(settings(), SHAPE, batch(), SECONDS.__getitem__, world=1)
    assert set(row) == {"rollout/tokens_per_second", "update/tokens_per_second"}
