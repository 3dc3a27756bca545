"""Models that cannot be divided as a configuration says."""

from __future__ import annotations

import pytest

from megatron_stppo.config import ConfigError, ParallelConfig
from megatron_stppo.config.section import enforce
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation.model_layout import check_layout, check_stages, of_layers
from tests.weights.reshard.pieces import model_shape

EXPERTS = model_shape(family="qwen3_moe", experts=6, hidden=16, ffn=16)


@pytest.mark.parametrize(
    ("sizes", "layout", "message"),
    [
        (
            {"heads": 40, "kv_heads": 40, "ffn": 120},
            {"tensor": 3},
            r"parallel\.tensor=3 must divide model\.num_attention_heads=40; choose 1, 2, 4, 5 or 8",
        ),
        (
            {"heads": 12, "kv_heads": 4},
            {"tensor": 3},
            r"parallel\.tensor=3 must divide or be a multiple of model\.num_key_value_heads=4; choose 1, 2",
        ),
        (
            {"ffn": 14},
            {"tensor": 4},
            r"parallel\.tensor=4 must divide model\.intermediate_size=14; choose 1 or 2",
        ),
        (
            {"heads": 6, "kv_heads": 6},
            {"tensor": 3, "field": "rollout.engine_tensor", "serving": True},
            r"rollout\.engine_tensor=3 must divide model\.vocab_size=300 padded to 320; choose 1 or 2",
        ),
    ],
)
def test_an_impossible_layout_gives_an_error_with_field_value_and_choices(sizes, layout, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(model_shape(**sizes), **layout)


@pytest.mark.parametrize(
    ("layers", "layout", "message"),
    [
        (6, Layout(pipeline=4), r"parallel\.pipeline=4 must divide .*layers=6; choose 1, 2, 3 or 6, or set"),
        (8, Layout(pipeline=2, virtual=3), r"virtual=3 must divide the 4 layers .*; choose 1, 2 or 4"),
        (6, Layout(virtual=2), r"parallel\.virtual=2: parallel\.pipeline=1 has one stage"),
        (
            6,
            Layout(pipeline=3, first_stage_layers=1),
            r"pipeline=3, parallel\.first_stage_layers=1 must divide .*=6 minus those; choose 2 or 6",
        ),
    ],
)
def test_impossible_stages_give_an_error_with_field_value_and_choices(layers, layout, message):
    with pytest.raises(ConfigError, match=message):
        check_stages(model_shape(layers=layers), layout)


@pytest.mark.parametrize(
    ("shape", "parallel", "message"),
    [
        (EXPERTS, {"expert": 4}, r"parallel\.expert=4 must divide the model's 6 experts; .* \[1, 2, 3, 6\]"),
        (
            EXPERTS,
            {"tensor": 4, "sequence": True},
            r"model\.moe_intermediate_size=16: .* a multiple of 32 with parallel\.tensor=4; use a smaller",
        ),
        (model_shape(), {"expert": 2}, r"parallel\.expert=2: the model has no experts; set it to 1"),
        (EXPERTS, {"tensor": 2}, r"parallel\.sequence=false: .* parallel\.tensor=2 .*; set it to true"),
    ],
)
def test_impossible_expert_parallelism_gives_an_error_with_field_value_and_remedy(shape, parallel, message):
    with pytest.raises(ConfigError, match=message):
        enforce(of_layers(shape, ParallelConfig(**parallel)))


def test_possible_expert_parallelism_passes():
    enforce(of_layers(EXPERTS, ParallelConfig(tensor=2, sequence=True, expert=3)))
    enforce(of_layers(model_shape(), ParallelConfig(tensor=2)))


def test_an_engine_does_not_spread_fewer_experts_than_it_has_ranks():
    with pytest.raises(ConfigError, match=r"rollout\.engine_tensor=4 exceeds the model's 2 experts"):
        check_layout(
            model_shape(family="qwen3_moe", experts=2), 4, field="rollout.engine_tensor", serving=True
        )
