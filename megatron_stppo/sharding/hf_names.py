"""The shape of a model and the tensor names of its Hugging Face checkpoint, without using transformers.

The shape is read from config.json. Every family in FAMILIES is the same decoder, with or without biases,
norms and experts, and with different tensor names.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stppo.config import ConfigError

REMEDY = "give model.path a Hugging Face checkpoint folder"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Family(NamedTuple):
    """The differences between a model family and Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    ffn: str = "intermediate_size"  # field of config.json with the number of rows of a gate projection
    renormalised: bool = True  # the value if config.json has no norm_topk_prob
    mlp: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "llama": Family(),
    "mixtral": Family(experts=True, mlp="block_sparse_moe", projections=("w1", "w3", "w2")),
    "qwen2": Family(qkv_bias=True),  # and Qwen2.5
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True, ffn="moe_intermediate_size", renormalised=False),
}
# The only supported values of these fields. They are also the values of fields that are missing or null.
PLAIN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
# Llama 3's scaled rotary embeddings: in megatron these values are constants, and only the factor can be set.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder}: config.json unreadable ({error.strerror}); {REMEDY}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{folder}: config.json is not JSON in UTF-8 ({error}); {REMEDY}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{folder}: config.json holds {type(raw).__name__}, not an object; {REMEDY}")
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"{folder}: model_type={name!r} is not supported; choose one of {sorted(FAMILIES)}")
    family = FAMILIES[name]
    _check_plain(folder, raw)
    count = functools.partial(_count, folder, raw)
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    experts = "num_experts" if raw.get("num_experts") else "num_local_experts"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{folder}: config.json's rope_scaling is {rope!r}, not an object; {REMEDY}")
    return ModelShape(
        family=name,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", hidden // heads),
        ffn=count(family.ffn),
        vocab=count("vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=_rate(folder, raw if raw.get("rope_theta") else rope, "rope_theta", 10000.0),
        norm_eps=_rate(folder, raw, "rms_norm_eps", 1e-6),
        max_positions=count("max_position_embeddings", 32768),
        rope_factor=_rope_factor(folder, rope),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=count(experts) if family.experts else 0,
        experts_per_token=count("num_experts_per_tok") if family.experts else 0,
        renormalised=raw.get("norm_topk_prob", family.renormalised),
    )


def _count(folder: Path, raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that must be an integer >= 1; null counts as missing. Raises ConfigError otherwise."""
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = "missing" if value is None else f"{value!r}, not a whole number above 0"
        raise ConfigError(f"{folder}: config.json's {name} is {shown}; fetch the file again")
    return value


def _rate(folder: Path, raw: dict[str, Any], name: str, default: float) -> float:
    """Return a field that must be a number > 0. Raises ConfigError otherwise."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{folder}: config.json's {name} is {value!r}, not above 0; fetch the file again")
    return float(value)


def _check_plain(folder: Path, raw: dict[str, Any]) -> None:
    unused = {"sliding_window"} if raw.get("use_sliding_window") is False else set()
    for name, plain in PLAIN.items():
        value = raw.get(name)
        if value not in (None, plain) and name not in unused:
            raise ConfigError(
                f"{folder}: {name}={value!r} is not supported; use a checkpoint with {name}={plain!r}"
            )


def _rope_factor(folder: Path, rope: dict[str, Any]) -> float | None:
    """Return the factor of Llama 3's scaling, or None for plain rotary embeddings.

    Raises ConfigError for any other kind of scaling.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{folder}: rope_type={kind!r} is not supported; use a checkpoint with default or llama3"
        )
    if kind == "default":
        return None
    for name, known in LLAMA3.items():
        if rope.get(name) != known:
            raise ConfigError(
                f"{folder}: {name}={rope.get(name)} of rope_type=llama3 is not supported, megatron "
                f"computes with {known}; use a checkpoint that does too"
            )
    return float(rope["factor"])


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor of the checkpoint. A tied checkpoint has no lm_head."""
    c, hidden = shape, (shape.hidden,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab, c.hidden), NORM: hidden}
    if not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
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
