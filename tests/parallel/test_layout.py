import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_stppo.config import ConfigError, ParallelConfig
from megatron_stppo.parallel.layout import Coordinates, Layout


def test_ranks_are_ordered_as_in_megatron():
    layout = Layout(tensor=2, pipeline=3, data=4, context=2)
    groups = RankGenerator(tp=2, ep=1, dp=4, pp=3, cp=2, order="tp-cp-ep-dp-pp")
    for axis, token in (("tensor", "tp"), ("context", "cp"), ("data", "dp"), ("pipeline", "pp")):
        for ranks in groups.get_ranks(token):
            assert [getattr(layout.coordinates(rank), axis) for rank in ranks] == list(range(len(ranks)))


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_experts_are_divided_as_in_megatron(expert):
    layout = Layout(tensor=2, pipeline=2, data=4, context=2, expert=expert)
    groups = RankGenerator(tp=2, ep=expert, dp=8 // expert, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    for ranks in groups.get_ranks("ep"):
        assert [layout.expert_rank(rank) for rank in ranks] == list(range(expert))


def test_rank_9_of_2x2x3_has_the_coordinates_of_the_docstring_and_rank_inverts_them():
    layout = Layout(tensor=2, pipeline=2, data=3)
    assert layout.coordinates(9) == Coordinates(tensor=1, pipeline=1, data=1)
    layout = Layout(tensor=2, pipeline=2, data=3, context=2)
    assert [layout.rank(layout.coordinates(rank)) for rank in range(24)] == list(range(24))


@pytest.mark.parametrize(
    ("world", "parallel", "message"),
    [
        (6, {"tensor": 2, "pipeline": 2}, r"tensor=2 \* parallel\.pipeline=2 .* 6; start a multiple of 4"),
        (4, {"tensor": 2, "context": 4}, r"parallel\.context=4 must .* 4; start a multiple of 8"),
        (6, {"expert": 4}, r"parallel\.expert=4 must divide the 6 ranks .* choose from \[1, 2, 3, 6\]"),
    ],
)
def test_a_number_of_ranks_that_the_layout_does_not_divide_is_refused(world, parallel, message):
    fits = ParallelConfig(tensor=2, pipeline=2)
    assert Layout.of_world(8, fits) == Layout(2, 2, 2)
    with pytest.raises(ConfigError, match=message):
        Layout.of_world(world, ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        (Layout(pipeline=2), 8, [[range(0, 4)], [range(4, 8)]]),
        (Layout(pipeline=2, virtual=2), 8, [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        (Layout(pipeline=2, first_stage_layers=3), 8, [[range(0, 3)], [range(3, 8)]]),
        (
            Layout(pipeline=3, first_stage_layers=1, last_stage_layers=2),
            5,
            [[range(1)], [range(1, 3)], [range(3, 5)]],
        ),
        (
            Layout(pipeline=2, virtual=2, last_stage_layers=2),
            6,
            [[range(0, 2), range(3, 5)], [range(2, 3), range(5, 6)]],
        ),
    ],
)
def test_layers_are_placed_as_in_megatron(layout, layers, expected):
    assert [layout.chunks(layers, stage) for stage in range(layout.pipeline)] == expected
    settings = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
    )
    for stage, chunks in enumerate(expected):
        for chunk, layers_of in enumerate(chunks):
            number = chunk if layout.virtual > 1 else None
            assert get_num_layers_to_build(settings, number, stage) == len(layers_of)
            assert get_transformer_layer_offset(settings, number, stage) == layers_of.start


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pipeline=2), 5),
        (Layout(pipeline=2, virtual=3), 8),
        (Layout(pipeline=2, first_stage_layers=8), 8),
        (Layout(pipeline=2, first_stage_layers=3, last_stage_layers=4), 8),
    ],
)
def test_layers_that_cannot_be_divided_have_no_stage_sizes(layout, layers):
    assert layout.stage_sizes(layers) is None
