"""One small model of every family, with the head size and the divisibility of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.weights.sharding.hf_fields import SCALING

SIZES: dict[str, Any] = {
    "vocab_size": 3001,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **SCALING}
HYBRID = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# {family: (prefix of its configuration in transformers, differences from SIZES)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": SCALED}),
    "qwen2": ("Qwen2", {}),
    "qwen2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512}),
    "qwen3.5": ("Qwen3_5", HYBRID),
    "qwen3.5_moe": ("Qwen3_5Moe", HYBRID | MIXTURE),
    "qwen3_next": ("Qwen3Next", HYBRID | MIXTURE),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 512,
            "head_dim": 64,
            "num_key_value_heads": 4,  # vLLM does not repeat them in this family
        },
    ),
}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "qwen3.5_moe", "qwen3_next", "gpt_oss")
LOCAL_ONLY = {"qwen3.5", "qwen3.5_moe", "qwen3_next", "gpt_oss"}  # no layers of TransformerEngine


def write_config(folder: Path, family: str) -> Path:
    """Write the config.json of a family and return its folder. A model without values needs nothing else."""
    import transformers

    prefix, special = FAMILIES[family]
    sizes = SIZES | special
    if family == "qwen3.5_moe":  # its configuration has no such field
        del sizes["intermediate_size"]
    text = "Text" if prefix.startswith("Qwen3_5") else ""
    settings = getattr(transformers, f"{prefix}{text}Config")(**sizes)
    settings.architectures = [f"{prefix}ForCausalLM"]
    settings.save_pretrained(folder / family)
    return folder / family
