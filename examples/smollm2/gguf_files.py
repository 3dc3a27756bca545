"""Random models of each family, and the GGUF files that llama.cpp's converter would make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from megatron_stppo.weights.sharding.hf_fields import SCALING
from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
from tests.rollout.vllm.tiny import TEMPLATE, build_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
ROPE = {"rope_theta": 5e5, "rope_type": "default"}
SCALED = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0} | SCALING
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Name: model_type, the architecture in the file, fields beside SIZES
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": SCALED}),
    "tied": ("llama", "llama", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", "llama", {"rope_parameters": ROPE} | MIXTRAL),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": ROPE}),
    "qwen3": ("qwen3", "qwen3", {"rope_parameters": ROPE, "head_dim": 128}),
    "qwen3_moe": ("qwen3_moe", "qwen3moe", {"rope_parameters": ROPE, "head_dim": 32} | EXPERTS),
}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
STACKED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def model(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of config.json and random weights."""
    kind, _, special = FAMILIES[name]
    fields = SIZES | special | {"model_type": kind}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_shape(folder))
    return fields, {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def in_file(fields: dict[str, Any], weights: dict[str, Tensor], architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors under llama.cpp's names, with its order of rows and its stacks of experts."""
    named = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, value in weights.items():
        stem, _, kind = key.rpartition(".")
        if stem in named:
            found[f"{named[stem]}.{kind}"] = value.numpy()
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if ".experts." in part:
            name = f"blk.{layer}.ffn_{STACKED[part.rpartition('.')[2]]}_exps.{kind}"
            stacks.setdefault(name, []).append(value.numpy())
            continue
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(PARTS[part])
        if heads and architecture == "llama":  # halves of each head, interleaved
            value = value.unflatten(0, (fields[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
        found[f"blk.{layer}.{PARTS[part]}.{kind}"] = value.contiguous().numpy()
    if fields["rope_parameters"]["rope_type"] == "llama3":
        found["rope_freqs.weight"] = divisors(fields["rope_parameters"], fields["head_dim"])
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def divisors(rope: dict[str, Any], size: int) -> np.ndarray:
    """Return Llama 3's divisors of the frequencies, one at a time."""
    found = []
    for i in range(0, size, 2):
        turns = SCALING["original_max_position_embeddings"] / (2 * np.pi * rope["rope_theta"] ** (i / size))
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        inside = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(rope["factor"] if smooth < 0 else 1.0 if smooth > 1 else inside)
    return np.array(found, dtype=np.float32)


def write(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], **given: Any) -> None:
    """Write a file. given: architecture, and optionally `kind` (a quantisation), `pre`, further values."""
    architecture, kind = given.pop("architecture"), given.pop("kind", GGMLQuantizationType.F32)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    if architecture != "qwen2":
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    if experts := fields.get("num_experts", fields.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(fields["num_experts_per_tok"])
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
    tokenizer = json.loads(build_tokenizer().backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(given.pop("pre", "smollm"))
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in given.items():
        writer.add_key_value(name.replace("__", "."), *value)
    for name, value in tensors.items():
        coded = kind if value.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(value, coded), raw_dtype=coded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
