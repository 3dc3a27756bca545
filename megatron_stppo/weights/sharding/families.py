"""The model families, as differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

KINDS = ("full_attention", "linear_attention")  # kinds of layers: attention, gated delta net
WINDOWS = ("sliding_attention", "full_attention")  # kinds in turn: attention to the last tokens, to all


class Family(NamedTuple):
    """The differences between a model family and Llama."""

    architecture: str  # the class of transformers
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    ffn: str = "intermediate_size"  # field of config.json with the number of rows of a gate projection
    renormalises: bool = True  # the weights of a token's experts; False: as norm_topk_prob says
    mlp: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    free_head_dim: bool = True  # False: vLLM always computes with hidden_size / num_attention_heads
    missing: Mapping[str, Any] = MappingProxyType({})  # values of missing fields, instead of those in MISSING
    sliding: str = "sliding_window"  # the field that turns sliding windows on
    delta_net: bool = False  # some layers are gated delta nets, as layer_types says
    joined: bool = False  # their projections are in_proj_qkvz and in_proj_ba
    output_gate: bool = False  # rows of q_proj are [query, gate] of each head
    offset_norm: bool = False  # norms multiply by 1 + weight, except that of a gated delta net
    shared_expert: bool = False  # all tokens pass through one more expert, which has a gate
    sinks: bool = False  # the softmax of attention has a term without a key; windows in turn; YaRN
    bias: bool = False  # in all linear layers but the vocabulary head
    router: str = "gate"
    stacked: bool = False  # one tensor has the same linear layer of all experts, see hf_files.py
    fixed: Mapping[str, Any] = MappingProxyType({})  # only supported values of fields, as in PLAIN
    left_out: tuple[str, ...] = ()  # prefixes of tensors that are not read: of images, of drafts


QWEN = "use_sliding_window"
HYBRID: dict[str, Any] = {  # of families with gated delta nets
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", missing={"max_position_embeddings": 2048}),
    "mixtral": Family(
        "MixtralForCausalLM",
        experts=True,
        mlp="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        missing={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2": Family(  # and Qwen2.5
        "Qwen2ForCausalLM",
        qkv_bias=True,
        free_head_dim=False,
        missing={"num_key_value_heads": 32},
        sliding=QWEN,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", qk_norm=True, missing={"num_key_value_heads": 32, "head_dim": 128}, sliding=QWEN
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=True,
        ffn="moe_intermediate_size",
        renormalises=False,
        missing={"num_key_value_heads": 4},
        sliding=QWEN,
    ),
    "qwen3_5_text": Family(  # and Qwen3.6
        "Qwen3_5ForCausalLM",
        qk_norm=True,
        delta_net=True,
        output_gate=True,
        offset_norm=True,
        missing=HYBRID | {"num_key_value_heads": 4},
        left_out=("mtp.", "model.visual."),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        qk_norm=True,
        experts=True,
        ffn="moe_intermediate_size",
        delta_net=True,
        output_gate=True,
        offset_norm=True,
        shared_expert=True,
        missing=HYBRID | {"num_key_value_heads": 2},
        left_out=("mtp.", "model.visual."),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        qk_norm=True,
        experts=True,
        ffn="moe_intermediate_size",
        renormalises=False,
        delta_net=True,
        joined=True,
        output_gate=True,
        offset_norm=True,
        shared_expert=True,
        missing=HYBRID | {"num_key_value_heads": 2, "norm_topk_prob": True},
        left_out=("mtp.",),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias=True,
        experts=True,
        missing={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        sliding=QWEN,
        sinks=True,
        bias=True,
        router="router",
        stacked=True,
        # vLLM computes with these, whatever config.json has
        fixed={
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
}
# {model_type of a model with images: that of its part for text, in the field text_config}
TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
