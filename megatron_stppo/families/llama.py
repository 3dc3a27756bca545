"""Llama, and families with other biases, norms or experts: Mixtral, Qwen2, Qwen3 and its mixture."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_stppo.weights.sharding.hf_names import ModelShape

WINDOW = frozenset({"sliding_window"})  # has no effect without use_sliding_window


class Llama(ModelShape):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048}


class Mixtral(ModelShape):
    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    }
    mixture = True
    block = "block_sparse_moe"
    linears = ("w1", "w3", "w2")
    row_parallel = (*ModelShape.row_parallel, "w2.weight")


class Qwen2(ModelShape):  # and Qwen2.5
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}
    unchecked = WINDOW | {"qkv_bias"}
    free_head_dim = False
    qkv_bias = True


class Qwen3(ModelShape):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}
    unchecked = WINDOW
    qk_norm = True


class Qwen3Moe(ModelShape):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}
    unchecked = WINDOW
    ffn_field = "moe_intermediate_size"
    always_renormalised = False
    mixture = True
    qk_norm = True
