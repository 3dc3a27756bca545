"""What a Hugging Face checkpoint says about a model: its shape, read from config.json without transformers.

Supported families: Qwen2 / Qwen2.5 (q, k, v biases), Qwen3 (q and k norms), dense only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_stppo.config import ConfigError

REMEDY = "give model.path a Hugging Face checkpoint folder"
FAMILIES = {"qwen2": {"qkv_bias": True, "qk_norm": False}, "qwen3": {"qkv_bias": False, "qk_norm": True}}
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

    def padded_vocab(self, tensor: int) -> int:
        """Rows megatron allocates: the vocabulary rounded up to a multiple of 128 * tensor."""
        unit = 128 * tensor
        return -(-self.vocab // unit) * unit


def read_shape(folder: Path) -> ModelShape:
    """Reads folder/config.json. Raises ConfigError for a missing file or an unsupported family."""
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
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    if raw.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"{folder}: scaled rotary embeddings are not supported; use a checkpoint with rope_type=default"
        )
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
        **FAMILIES[family],
    )


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
