"""Check the fields of `megatron:`, which go to megatron's TransformerConfig. Does not import torch."""

from __future__ import annotations

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.validation import passed_on

# Fields of megatron that would change what is trained.
REFUSED = (
    dict.fromkeys(
        ("attention_dropout", "hidden_dropout"),
        "importance ratios need the same network twice",
    )
    | dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff"),
        "megatron multiplies it by the tokens of a microbatch, and no gradient is divided by them here",
    )
    | dict.fromkeys(
        ("moe_permute_fusion", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
        "model/experts.py decides the order of the experts' tokens",
    )
)
# Fields of megatron that follow from other fields of the configuration. Another value would train a different
# network or scale its gradient, not always with an error.
DECIDED = {
    "tensor_model_parallel_size": "parallel.tensor",
    "expert_tensor_parallel_size": "parallel.tensor",
    "sequence_parallel": "parallel.sequence",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "variable_seq_lengths": "parallel.virtual",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "model.dtype"),
    "pipeline_model_parallel_layout": "parallel.pipeline",
    "calculate_per_token_loss": "the losses, which have their own denominators",
    "moe_token_dispatcher_type": "the order of the experts' tokens, which needs alltoall",
    "moe_router_load_balancing_type": "the losses, of which only the policy gradient trains the router",
    **dict.fromkeys(
        ("moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_router_force_load_balancing"),
        "the importance ratios, which need the same network twice",
    ),
}
# Fields of megatron that say which function the network computes.
ARCHITECTURE = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels add_bias_linear
    add_qkv_bias qk_layernorm qk_l2_norm normalization layernorm_epsilon layernorm_zero_centered_gamma
    apply_residual_connection_post_layernorm rotary_interleaved gated_linear_unit activation_func
    activation_func_clamp_value glu_linear_offset softmax_scale softmax_type window_size
    window_attn_skip_freq attention_output_gate multi_latent_attention experimental_attention_variant
    linear_attention_freq no_rope_freq mrope_section is_hybrid_model mtp_num_layers
    heterogeneous_block_specs num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
    moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
    moe_apply_probs_on_input
""".split()
# Of megatron's AttnBackend, without "local", with which TransformerEngine's layers have no backend.
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "auto")
DECIDED |= dict.fromkeys(ARCHITECTURE, "the architecture, which config.json in model.path determines")


def check(config: Config) -> None:
    """Raise ConfigError for a field that does not exist, follows from another field, or changes what is
    trained."""
    for name, reason in REFUSED.items():
        if config.megatron.get(name):
            raise ConfigError(
                f"megatron.{name}={config.megatron[name]}: {reason}; leave it out, or set it to 0"
            )
    if config.megatron.get("moe_router_fusion") and config.algorithm.routing_replay != "off":
        raise ConfigError(
            f"megatron.moe_router_fusion=True: the fused router cannot replay experts "
            f"(algorithm.routing_replay={config.algorithm.routing_replay}); leave it out, or set "
            "algorithm.routing_replay=off"
        )
    backend = config.megatron.get("attention_backend", "auto")
    if backend not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"megatron.attention_backend={backend!r}: not a backend of TransformerEngine's attention; "
            f"choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    passed_on.check("megatron", config.megatron, DECIDED, declared(), "megatron's TransformerConfig")


def declared() -> dict[str, str]:
    """Return the fields of the installed TransformerConfig with their types, without importing megatron."""
    return passed_on.declared(
        "megatron.core",
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    )
