"""The shape of a model and the tensor names of its Hugging Face checkpoint, without using transformers.

The shape is read from config.json. Every family in FAMILIES is the same decoder, with or without biases,
norms and experts, and with different tensor names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_fields import (
    FAMILIES,
    count_of,
    experts_field,
    flag_of,
    rate_of,
    read_fields,
    rope_factor,
    rope_settings,
)

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# of a critic: the head of transformers' ForTokenClassification with one label. Reward models have no bias.
VALUE, VALUE_BIAS = "score.weight", "score.bias"
Head = Literal["vocabulary", "value", "none"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Example: Qwen2.5-7B is ModelShape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, ...).
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, in a model with experts
    vocab: int  # rows of the embedding, without padding
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    rope_factor: float | None = None  # factor of Llama 3's scaling; None: plain rotary embeddings
    experts: int = 0  # per layer; 0: a dense model
    experts_per_token: int = 0
    renormalised: bool = True  # True: softmax over the chosen experts of a token; False: over all experts

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows that megatron allocates: `vocab` rounded up to a multiple of 128 * tensor."""
        unit = 128 * tensor
        return -(-self.vocab // unit) * unit

    def mlp_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{FAMILIES[self.family].mlp}."

    def router(self, layer: int) -> str:
        return self.mlp_prefix(layer) + "gate.weight"

    def projections(self, layer: int, expert: int | None = None) -> tuple[str, str, str]:
        """Return the names of the gate, up and down projections (of one expert, in a model with experts)."""
        prefix = self.mlp_prefix(layer) + (f"experts.{expert}." if self.experts else "")
        gate, up, down = (f"{prefix}{name}.weight" for name in FAMILIES[self.family].projections)
        return gate, up, down


def read_shape(folder: Path) -> ModelShape:
    """Read folder/config.json. Raises ConfigError if it is missing or the model is not supported."""
    given = read_fields(folder)
    name, family = given["model_type"], FAMILIES[given["model_type"]]
    count = functools.partial(count_of, folder, given)
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    head_dim, rope = count("head_dim", hidden // heads), rope_settings(folder, given)
    if not family.free_head_dim and head_dim != hidden // heads:
        raise ConfigError(
            f"{folder}: head_dim={head_dim} of model_type={name!r} is not supported, vLLM computes with "
            f"hidden_size / num_attention_heads = {hidden // heads}; use a checkpoint with that head_dim"
        )
    return ModelShape(
        family=name,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=count(family.ffn),
        vocab=count("vocab_size"),
        tied=flag_of(folder, given, "tie_word_embeddings"),
        rope_theta=rate_of(folder, rope, "rope_theta"),
        norm_eps=rate_of(folder, given, "rms_norm_eps"),
        max_positions=count("max_position_embeddings"),
        rope_factor=rope_factor(folder, rope),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=count(experts_field(folder, given)) if family.experts else 0,
        experts_per_token=count("num_experts_per_tok") if family.experts else 0,
        renormalised=family.renormalises or flag_of(folder, given, "norm_topk_prob"),
    )


def hf_shapes(shape: ModelShape, head: Head = "vocabulary") -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor of the checkpoint. A tied checkpoint has no lm_head."""
    c, hidden = shape, (shape.hidden,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab, c.hidden), NORM: hidden}
    if head == "vocabulary" and not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
    if head == "value":
        shapes |= {VALUE: (1, c.hidden), VALUE_BIAS: (1,)}
    rows = {"q_proj": c.heads * c.head_dim, "k_proj": c.kv_heads * c.head_dim}
    rows["v_proj"] = rows["k_proj"]
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        for name, size in rows.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (size, c.hidden)
            if c.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (size,)
        if c.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (c.hidden, rows["q_proj"])
        if c.experts:
            shapes[c.router(layer)] = (c.experts, c.hidden)
        for expert in range(c.experts or 1):
            gate, up, down = c.projections(layer, expert)
            shapes |= {gate: (c.ffn, c.hidden), up: (c.ffn, c.hidden), down: (c.hidden, c.ffn)}
        shapes[f"{prefix}input_layernorm.weight"] = hidden
        shapes[f"{prefix}post_attention_layernorm.weight"] = hidden
    return shapes
