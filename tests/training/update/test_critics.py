from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.config import Config
from megatron_stppo.config.section import enforce
from megatron_stppo.validation import checks
from tests.ranks import run_ranks
from tests.training.update import layouts, whole


def test_the_critic_makes_its_steps_on_each_minibatch_while_the_actor_is_held(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    ((row, steps, changed),) = run_ranks(whole.several, 1, str(tmp_path / "hf"), str(tmp_path), 3)
    assert steps == 2 * 3 and changed == {"actor": False, "critic": True}
    assert row["actor/held"] == 1 and row["critic/skipped"] == row["actor/kl_after"] == 0


def test_a_frozen_attention_keeps_its_weights_also_after_a_resumption(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    ((changed, equal),) = run_ranks(whole.frozen, 1, str(tmp_path / "hf"), str(tmp_path))
    attention = {name for name in changed if ".self_attention." in name}
    assert len(attention) >= 2
    assert {name for name, moved in changed.items() if not moved} == attention
    assert equal, "the resumed critic differs"


def test_a_frozen_attention_is_the_models_on_several_ranks_and_the_rest_is_that_of_one_rank(
    tmp_path: Path,
) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=2)
    model, found = load_file(tmp_path / "hf" / "model.safetensors"), {}
    for name, ranks, parallel in (("one", 1, {}), ("data", 2, {}), ("tensor", 2, {"tensor": 2})):
        run_ranks(whole.frozen_on, ranks, str(tmp_path / "hf"), str(tmp_path / name), parallel)
        found[name] = load_file(tmp_path / name / "critic" / "model.safetensors")
    assert found["one"].keys() == {*model, "score.weight", "score.bias"}
    for key, one in found["one"].items():
        for other in (found["data"][key], found["tensor"][key]):
            if ".self_attn." in key:
                assert torch.equal(other, model[key]) and torch.equal(one, model[key]), key
                continue
            moved = one - model[key] if key in model else one
            assert moved.count_nonzero(), key
            assert float((other - one).abs().sum()) < 1e-3 * float(moved.abs().sum()), key


def test_a_run_begins_with_the_weights_and_the_value_head_of_critic_path(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    run_ranks(whole.frozen_on, 1, str(tmp_path / "hf"), str(tmp_path), {})
    critic = load_file(tmp_path / "critic" / "model.safetensors")
    ((weights, errors),) = run_ranks(
        whole.begun, 1, str(tmp_path / "hf"), str(tmp_path / "critic"), str(tmp_path)
    )
    for name, key in (
        ("output_layer.weight", "score.weight"),
        ("output_layer.bias", "score.bias"),
        ("decoder.layers.0.mlp.linear_fc2.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        assert (weights[name] == critic[key].numpy()).all() and weights[name].any(), name
    assert errors[0] == ""
    assert errors[1].startswith("model.critic_path=None: the run's critic began with other weights; give ")


@pytest.mark.parametrize(
    ("update", "preset", "problem"),
    [
        ({"critic_only": 2}, "grpo", "update.critic_only=2 with algorithm.advantage=group"),
        ({"critic_steps": 2}, "grpo", "update.critic_steps=2 with algorithm.advantage=group"),
        (
            {"critic": {"frozen_attention": True}},
            "grpo",
            "frozen_attention=True with algorithm.advantage=group",
        ),
        ({"critic_only": 9}, "st_ppo", "update.critic_only=9 with run.iterations=9"),
    ],
)
def test_settings_without_an_effect_are_refused(update: dict, preset: str, problem: str) -> None:
    given = {
        "model": {"path": "m"},
        "run": {"iterations": 9},
        "update": update,
        "algorithm": {"preset": preset},
    }
    with pytest.raises(ConfigError, match=problem):
        enforce(checks._critic(Config.model_validate(given), "train"))
