from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.spans import serving_spans, training_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Span
from tests.weights.reshard.pieces import model_shape

A = "model.layers.0.self_attn."
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
# 4 heads of 2 rows, 2 KV groups: each group is 4 query rows, 2 key rows, 2 value rows; 16 rows in all.
EXPERTS = model_shape(family="qwen3_moe", experts=6)  # ffn 12


def test_a_tensor_rank_holds_whole_groups_of_query_key_value():
    spans = training_spans(model_shape(), Layout(2, 1, 1), 1)[QKV]
    assert spans == (
        Span(A + "q_proj.weight", 0, 4, 4, 0),
        Span(A + "k_proj.weight", 0, 2, 2, 4),
        Span(A + "v_proj.weight", 0, 2, 2, 6),
    )


def test_with_more_ranks_than_groups_a_group_is_split():
    # 4 rows each: rank 2 has the second group's queries, rank 3 its key and value
    shape, layout = model_shape(), Layout(4, 1, 1)
    assert training_spans(shape, layout, 2)[QKV] == (Span(A + "q_proj.weight", 0, 4, 4, 0),)
    assert training_spans(shape, layout, 3)[QKV] == (
        Span(A + "k_proj.weight", 0, 2, 2, 0),
        Span(A + "v_proj.weight", 0, 2, 2, 2),
    )


def test_the_engine_repeats_a_kv_head_on_the_ranks_that_share_it():
    spans = serving_spans(model_shape(), 4, 3)[A + "qkv_proj.weight"]
    assert spans == (
        Span(A + "q_proj.weight", 0, 6, 2, 0),
        Span(A + "k_proj.weight", 0, 2, 2, 2),
        Span(A + "v_proj.weight", 0, 2, 2, 4),
    )
    assert serving_spans(model_shape(), 4, 2)[A + "qkv_proj.weight"][1] == spans[1]


def test_gate_and_up_are_split_before_they_are_joined():
    spans = training_spans(model_shape(), Layout(2, 1, 1), 1)["decoder.layers.0.mlp.linear_fc1.weight"]
    assert spans == (
        Span("model.layers.0.mlp.gate_proj.weight", 0, 6, 6, 0),
        Span("model.layers.0.mlp.up_proj.weight", 0, 6, 6, 6),
    )


def test_a_stage_numbers_its_layers_from_zero_and_only_the_end_stages_hold_the_vocabulary():
    spans = training_spans(model_shape(), Layout(1, 2, 1), 1)
    assert spans["decoder.layers.1.mlp.linear_fc2.weight"][0].hf_key == "model.layers.3.mlp.down_proj.weight"
    assert "embedding.word_embeddings.weight" not in spans
    # 300 rows, padded to 384
    assert spans["output_layer.weight"] == (
        Span("lm_head.weight", 0, 0, 300, 0),
        Span(PADDING, 0, 0, 84, 300),
    )


def test_the_last_stages_copy_of_a_tied_embedding_is_filled_by_an_import_and_never_read():
    shape, layout = model_shape(tied=True), Layout(1, 2, 1)
    assert "output_layer.weight" not in training_spans(shape, layout, 1)
    copy = training_spans(shape, layout, 1, tied_copy=True)["output_layer.weight"]
    assert copy[0].hf_key == "model.embed_tokens.weight"
    assert "output_layer.weight" not in training_spans(shape, Layout(1, 1, 1), 0, tied_copy=True)


def test_a_critic_has_its_own_head():
    assert "output_layer.weight" not in training_spans(model_shape(), Layout(), 0, head="none")


def test_transformer_engine_keeps_the_norms_in_the_linear_layers():
    spans = training_spans(model_shape(), Layout(), 0, spec="transformer_engine")
    norm = spans["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
    assert norm[0].hf_key == "model.layers.0.input_layernorm.weight"
    assert "decoder.layers.0.input_layernorm.weight" not in spans


def test_model_chunks_of_a_pipeline_rank_have_distinct_names():
    shape, layout = model_shape(layers=4), Layout(pipeline=2, virtual=2)
    norms = [
        {
            name: spans[0].hf_key
            for name, spans in training_spans(shape, layout, rank).items()
            if "input" in name
        }
        for rank in (0, 1)
    ]
    name, layer = "{}.decoder.layers.0.input_layernorm.weight", "model.layers.{}.input_layernorm.weight"
    assert norms[0] == {name.format(0): layer.format(0), name.format(1): layer.format(2)}
    assert norms[1] == {name.format(0): layer.format(1), name.format(1): layer.format(3)}
    assert "0.embedding.word_embeddings.weight" in training_spans(shape, layout, 0)
    assert "1.decoder.final_layernorm.weight" in training_spans(shape, layout, 1)


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
