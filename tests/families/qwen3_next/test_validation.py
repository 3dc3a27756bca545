"""What is refused for a model with gated delta nets, and what a plan counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.observe.throughput import forward_flop, mixing_flop
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import H100
from megatron_stppo.plan.times import layers_to_plan
from megatron_stppo.plan.usage import EngineUse
from megatron_stppo.validation import lora
from megatron_stppo.validation.model_layout import check_layout, check_parallel
from megatron_stppo.weights.sharding.hf_names import read_shape

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


def config(folder: Path, **sections: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(FIELDS))
    model = {"path": str(folder), **sections.pop("model", {})}
    return Config.model_validate({"model": model, **sections})


def test_context_parallelism_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel.context=2: 3 of the model's 4 layers are .* set it"):
        check_parallel(config(tmp_path, parallel={"context": 2}), 2)


def test_transformer_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.layers=transformer_engine: .* set it to local"):
        check_parallel(config(tmp_path, model={"layers": "transformer_engine"}), 1)


def test_an_optimizer_that_is_not_distributed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"update.critic.distributed=false: .* set it to true"):
        check_parallel(config(tmp_path, update={"critic": {"distributed": False}}), 1)


def test_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.rank=4: .*qwen3_5_text.* set model.lora.rank=0"):
        lora.check(config(tmp_path, model={"lora": {"rank": 4}}))


@pytest.mark.parametrize("serving", [False, True])
def test_tensor_ranks_must_divide_the_key_heads(tmp_path: Path, serving: bool) -> None:
    shape = read_shape(config(tmp_path).model.path)
    with pytest.raises(ConfigError, match=r"=4 must divide model.linear_num_key_heads=2; choose 1 or 2"):
        check_layout(shape, 4, serving=serving)


def test_states_and_keys_of_the_engine_are_counted_by_layer(tmp_path: Path) -> None:
    """Three layers have 4 matrices of 3 * 5 in float32, and 3 tokens of 2 * 2 * 3 + 4 * 5 channels."""
    given = config(tmp_path)
    use = EngineUse.of(given, read_shape(given.model.path), 0, 2, H100)
    assert use.state == 3 * (4 * 4 * 15 + 2 * 3 * 32)
    assert use.cache_per_token == 2 * 1 * 2 * 8 * 2


def test_flop_of_a_token_are_those_of_each_kind_of_layer(tmp_path: Path) -> None:
    shape = read_shape(config(tmp_path).model.path)
    mlp, attention, net = 3 * 16 * 32, 16 * (64 + 2 * 16 + 32), 16 * (2 * 6 + 2 * 20 + 2 * 4 + 20)
    states = 3 * 6 * 4 * 3 * 5
    assert mixing_flop(shape, [1]) == states + 2 * 4 * 8
    assert forward_flop(shape, [1]) == 2 * (4 * mlp + attention + 3 * net) + states + 2 * 4 * 8


def test_a_plan_of_a_mixture_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    sizes = FIELDS | experts | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert layers_to_plan(read_shape(tmp_path), Layout(1, 2)) == {0: 3, 3: 1, 4: 3, 7: 1}
