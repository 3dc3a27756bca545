"""What a Hugging Face checkpoint says about a model: its shape, read from config.json without transformers.

Supported families: Llama 3, Qwen2 / Qwen2.5 (q, k, v biases), Qwen3 (q and k norms), dense only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError

REMEDY = "give model.path a Hugging Face checkpoint folder"
FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
# What the layers do not do otherwise; a field that config.json leaves out, or null, has this value.
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}
# Llama 3's scaled rotary embeddings: megatron has these constants in its code and takes the factor only.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder.

    Example: Qwen2.5-7B is ModelShape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, ...).
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # true rows of the embedding, before any padding
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    rope_factor: float | None = None  # of Llama 3's scaling; None: plain rotary embeddings

    def padded_vocab(self, tensor: int) -> int:
        """Rows megatron allocates: the vocabulary rounded up to a multiple of 128 * tensor."""
        unit = 128 * tensor
        return -(-self.vocab // unit) * unit


def read_shape(folder: Path) -> ModelShape:
    """Reads folder/config.json. Raises ConfigError for a missing file, or a model that is not supported."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{folder}: config.json unreadable ({error.strerror}); {REMEDY}") from None
    except json.JSONDecodeError:
        raise ConfigError(f"{folder}: config.json is not JSON; {REMEDY}") from None
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{folder}: model_type={family!r} is not supported; choose one of {sorted(FAMILIES)}"
        )
    _check_plain(folder, raw)
    heads, rope = raw["num_attention_heads"], raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelShape(
        family=family,
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw.get("max_position_embeddings", 32768)),
        rope_factor=_rope_factor(folder, rope),
        **FAMILIES[family],
    )


def _check_plain(folder: Path, raw: dict[str, Any]) -> None:
    unused = {"sliding_window"} if raw.get("use_sliding_window") is False else set()
    for name, plain in PLAIN.items():
        value = raw.get(name)
        if value not in (None, plain) and name not in unused:
            raise ConfigError(
                f"{folder}: {name}={value!r} is not supported; use a checkpoint with {name}={plain!r}"
            )


def _rope_factor(folder: Path, rope: dict[str, Any]) -> float | None:
    """Of Llama 3's scaling, or None for plain rotary embeddings. Raises ConfigError for any other."""
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
    """{name: shape} of every tensor of the checkpoint; a tied checkpoint has no lm_head."""
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
        shapes[f"{prefix}mlp.gate_proj.weight"] = (c.ffn, c.hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (c.ffn, c.hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (c.hidden, c.ffn)
        shapes[f"{prefix}input_layernorm.weight"] = hidden
        shapes[f"{prefix}post_attention_layernorm.weight"] = hidden
    return shapes
