from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.spans import serving_spans, training_spans
from megatron_stppo.weights.sharding.tiles import Span
from tests.weights.reshard.pieces import model_shape

EXPERTS = model_shape(family="qwen3_moe", experts=6)  # ffn 12


def test_a_rank_numbers_its_experts_from_zero_and_splits_them_over_the_tensor_axis():
    # rank 3 with tensor=2, data=2: the second half of the rows of the last three experts
    spans = training_spans(EXPERTS, Layout(2, 1, 2, expert=2), 3)
    expert = "model.layers.1.mlp.experts.4."
    assert spans["decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"] == (
        Span(expert + "gate_proj.weight", 0, 6, 6, 0),
        Span(expert + "up_proj.weight", 0, 6, 6, 6),
    )
    assert spans["decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"] == (
        Span(expert + "down_proj.weight", 1, 6, 6, 0),
    )
    assert spans["decoder.layers.1.mlp.router.weight"] == (
        Span("model.layers.1.mlp.gate.weight", 0, 0, 6, 0),
    )
    assert not any("local_experts.3" in name for name in spans)


def test_transformer_engine_groups_experts_and_keeps_the_norm_before_them():
    spans = training_spans(EXPERTS, Layout(1, 1, 2, expert=2), 1, spec="transformer_engine")
    prefix = "decoder.layers.0."
    assert spans[prefix + "mlp.experts.linear_fc2.weight2"][0].hf_key.endswith("experts.5.down_proj.weight")
    assert prefix + "pre_mlp_layernorm.weight" in spans
    assert prefix + "self_attention.linear_qkv.layer_norm_weight" in spans


def test_w1_w3_and_w2_of_mixtral_are_gate_up_and_down():
    spans = serving_spans(model_shape(family="mixtral", experts=2), 2, 1)
    prefix = "model.layers.0.block_sparse_moe.experts."
    assert spans[prefix + "routed_experts.w13_weight.1"] == (
        Span(prefix + "1.w1.weight", 0, 6, 6, 0),
        Span(prefix + "1.w3.weight", 0, 6, 6, 6),
    )
    assert spans[prefix + "routed_experts.w2_weight.1"] == (Span(prefix + "1.w2.weight", 1, 6, 6, 0),)
