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
from megatron_stppo.weights.sharding.delta_net import DeltaNet
from megatron_stppo.weights.sharding.families import FAMILIES
from megatron_stppo.weights.sharding.hf_fields import (
    count_of,
    experts_field,
    flag_of,
    layer_kinds,
    rate_of,
    read_fields,
    rope_factor,
    rope_settings,
    rotary_share,
    window_kinds,
)
from megatron_stppo.weights.sharding.yarn import Yarn

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
    kinds: tuple[str, ...] = ()  # of each layer, see KINDS in hf_fields.py; (): all are attention
    delta_net: DeltaNet | None = None  # sizes of the layers that are gated delta nets
    output_gate: bool = False  # attention is multiplied by sigmoid of a gate, whose rows are in q_proj
    offset_norm: bool = False  # norms multiply by 1 + weight, except that of a gated delta net
    rotary_share: float = 1.0  # of a head, that is rotated
    shared_ffn: int = 0  # of the expert that all tokens pass through; 0: there is none
    sinks: bool = False  # the softmax of attention has one more term per head, which belongs to no token
    window: int = 0  # tokens that sliding attention sees, the token itself included
    bias: bool = False  # all linear layers have biases but the vocabulary head
    stacked: bool = False  # experts have one projection with gate and up in turn, and clamp it
    yarn: Yarn | None = None  # of the rotary embeddings

    @property
    def recurrent_layers(self) -> int:
        """The number of layers that are gated delta nets."""
        return self.kinds.count("linear_attention")

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def query_rows(self) -> int:
        """Rows of q_proj: the queries of all heads, and their gates."""
        return self.heads * self.head_dim * (2 if self.output_gate else 1)

    def delta_net_of(self, layer: int) -> DeltaNet | None:
        """Return the sizes of a layer that is a gated delta net; None for attention."""
        return self.delta_net if self.kinds and self.kinds[layer] == "linear_attention" else None

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a layer's attention sees; 0 if it sees all before."""
        return self.window if self.kinds and self.kinds[layer] == "sliding_attention" else 0

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows that megatron allocates: `vocab` rounded up to a multiple of 128 * tensor."""
        unit = 128 * tensor
        return -(-self.vocab // unit) * unit

    def mlp_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{FAMILIES[self.family].mlp}."

    def router(self, layer: int) -> str:
        return f"{self.mlp_prefix(layer)}{FAMILIES[self.family].router}.weight"

    def router_bias(self, layer: int) -> str:
        return f"{self.mlp_prefix(layer)}{FAMILIES[self.family].router}.bias"

    def projections(self, layer: int, expert: int | None = None) -> tuple[str, str, str]:
        """Return the names of the gate, up and down projections (of one expert, in a model with experts)."""
        prefix = self.mlp_prefix(layer) + (f"experts.{expert}." if self.experts else "")
        gate, up, down = (f"{prefix}{name}.weight" for name in FAMILIES[self.family].projections)
        return gate, up, down

    def linears(self, layer: int, expert: int) -> tuple[str, str]:
        """Return the names of an expert's two layers, without "weight" and "bias": the rows of gate and up in
        turn, and down. The checkpoint has no such tensors, but those of all experts (hf_files.stack_of)."""
        prefix = f"{self.mlp_prefix(layer)}experts.{expert}."
        return f"{prefix}gate_up.", f"{prefix}down."

    def shared(self, layer: int) -> tuple[str, str, str]:
        """Return the names of the shared expert's gate, up and down projections."""
        prefix = f"{self.mlp_prefix(layer)}shared_expert."
        return f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", f"{prefix}down_proj.weight"

    def shared_gate(self, layer: int) -> str:
        """Return the name of the row whose product with a token gates the shared expert."""
        return self.mlp_prefix(layer) + "shared_expert_gate.weight"


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
    delta_net = None
    if family.delta_net:
        delta_net = DeltaNet(
            key_heads=count("linear_num_key_heads"),
            value_heads=count("linear_num_value_heads"),
            key_dim=count("linear_key_head_dim"),
            value_dim=count("linear_value_head_dim"),
            width=count("linear_conv_kernel_dim"),
            joined=family.joined,
        )
        if delta_net.value_heads % delta_net.key_heads:
            raise ConfigError(
                f"{folder}: linear_num_value_heads={delta_net.value_heads} must be a multiple of "
                f"linear_num_key_heads={delta_net.key_heads}; fetch config.json again"
            )
    kinds = window_kinds(folder, given) if family.sinks else ()
    kinds = layer_kinds(folder, given) if family.delta_net else kinds
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
        rope_factor=None if family.sinks else rope_factor(folder, rope, family.delta_net),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=count(experts_field(folder, given)) if family.experts else 0,
        experts_per_token=count("num_experts_per_tok") if family.experts else 0,
        renormalised=family.renormalises or flag_of(folder, given, "norm_topk_prob"),
        kinds=kinds,
        delta_net=delta_net,
        output_gate=family.output_gate,
        offset_norm=family.offset_norm,
        rotary_share=rotary_share(folder, rope, head_dim) if family.delta_net else 1.0,
        shared_ffn=count("shared_expert_intermediate_size") if family.shared_expert else 0,
        sinks=family.sinks,
        window=count("sliding_window") if family.sinks else 0,
        bias=family.bias,
        stacked=family.stacked,
        yarn=Yarn.of(folder, rope) if family.sinks else None,
    )


def hf_shapes(shape: ModelShape, head: Head = "vocabulary") -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor of the checkpoint. A tied checkpoint has no lm_head."""
    c, hidden = shape, (shape.hidden,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab, c.hidden), NORM: hidden}
    if head == "vocabulary" and not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
    if head == "value":
        shapes |= {VALUE: (1, c.hidden), VALUE_BIAS: (1,)}
    for layer in range(c.layers):
        prefix, net = f"model.layers.{layer}.", c.delta_net_of(layer)
        shapes |= _attention(c, prefix + "self_attn.") if net is None else {}
        shapes |= net.shapes(prefix + "linear_attn.", c.hidden) if net is not None else {}
        if c.experts:
            shapes[c.router(layer)] = (c.experts, c.hidden)
        if c.stacked:
            shapes |= _biased_experts(c, layer)
        for expert in range(0 if c.stacked else c.experts or 1):
            shapes |= _projections(c.projections(layer, expert), c.ffn, c.hidden)
        if c.shared_ffn:
            shapes |= _projections(c.shared(layer), c.shared_ffn, c.hidden)
            shapes[c.shared_gate(layer)] = (1, c.hidden)
        shapes[f"{prefix}input_layernorm.weight"] = hidden
        shapes[f"{prefix}post_attention_layernorm.weight"] = hidden
    return shapes


def _attention(c: ModelShape, prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    keys = c.kv_heads * c.head_dim
    for name, size in {"q_proj": c.query_rows, "k_proj": keys, "v_proj": keys}.items():
        shapes[f"{prefix}{name}.weight"] = (size, c.hidden)
        if c.qkv_bias:
            shapes[f"{prefix}{name}.bias"] = (size,)
    if c.qk_norm:
        shapes[f"{prefix}q_norm.weight"] = (c.head_dim,)
        shapes[f"{prefix}k_norm.weight"] = (c.head_dim,)
    shapes[f"{prefix}o_proj.weight"] = (c.hidden, c.heads * c.head_dim)
    if c.bias:
        shapes[f"{prefix}o_proj.bias"] = (c.hidden,)
    if c.sinks:
        shapes[f"{prefix}sinks"] = (c.heads,)
    return shapes


def _biased_experts(c: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's experts and the router's bias, linear layer by linear layer."""
    shapes: dict[str, tuple[int, ...]] = {c.router_bias(layer): (c.experts,)}
    for number, (rows, columns) in enumerate(((2 * c.ffn, c.hidden), (c.hidden, c.ffn))):
        of_experts = [c.linears(layer, expert)[number] for expert in range(c.experts)]
        shapes |= {f"{name}weight": (rows, columns) for name in of_experts}
        shapes |= {f"{name}bias": (rows,) for name in of_experts}
    return shapes


def _projections(names: tuple[str, str, str], ffn: int, hidden: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}
