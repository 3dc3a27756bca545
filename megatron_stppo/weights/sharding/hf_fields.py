"""The fields of config.json that change what a model computes. They are read as transformers reads them, or
refused.

tests/weights/sharding/test_hf_fields.py compares the tables with the classes of transformers. Some refused
fields are read by vLLM only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_stppo.config import ConfigError

REMEDY = "give model.path a Hugging Face checkpoint folder"


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


QWEN = "use_sliding_window"
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
}
# Fields that may be missing, and the values that transformers uses then. None: follows from other fields.
MISSING: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "norm_topk_prob": False,
}
# Fields that change what transformers or vLLM computes, and their only supported values. They are also the
# values of fields that are missing or null.
PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "dual_chunk_attention_config": None,
    "per_layer_config": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_base": None,
    "mrope_section": None,
    "xdrope_section": None,
}
# Llama 3's scaled rotary embeddings: in megatron these values are constants, and only the factor can be set.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of folder/config.json, with the values of those that are missing.

    Raises ConfigError if the file is missing or the model is not supported.
    """
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
    _check_plain(folder, raw, FAMILIES[name])
    return MISSING | dict(FAMILIES[name].missing) | raw


def count_of(folder: Path, raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that must be an integer >= 1; null is `default`. Raises ConfigError otherwise."""
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = "missing" if value is None else f"{value!r}, not a whole number above 0"
        raise ConfigError(f"{folder}: config.json's {name} is {shown}; fetch the file again")
    return value


def rate_of(folder: Path, raw: Mapping[str, Any], name: str) -> float:
    """Return a field that must be a finite number > 0. Raises ConfigError otherwise."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{folder}: config.json's {name} is {value!r}, not above 0; fetch the file again")
    return float(value)


def flag_of(folder: Path, raw: Mapping[str, Any], name: str) -> bool:
    """Return a field that must be true or false. Raises ConfigError otherwise."""
    value = raw[name]
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{folder}: config.json's {name} is {value!r}, not true or false; fetch the file again")


def experts_field(folder: Path, raw: Mapping[str, Any]) -> str:
    """Return the name of the field with the number of experts, which has two names in transformers."""
    first, second = names = ("num_experts", "num_local_experts")
    if None not in (values := [raw.get(name) for name in names]) and values[0] != values[1]:
        raise ConfigError(
            f"{folder}: config.json has {first}={values[0]!r} and {second}={values[1]!r}; remove one of them"
        )
    return first if raw.get(first) is not None else second


def _check_plain(folder: Path, raw: Mapping[str, Any], family: Family) -> None:
    """Raise ConfigError if a field has a value with which the model would compute something else."""
    quantised = raw.get("quantization_config") or raw.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{folder}: quantization_config.quant_method={method!r} is not supported, the weights would be "
            "read without their scales; use the model's folder in bfloat16, or dequantise it"
        )
    off = {"sliding_window"} - {family.sliding} | ({"qkv_bias"} if family.qkv_bias else set())
    for name, plain in PLAIN.items():
        value = raw.get(name)
        if value not in (None, plain) and name not in off:
            raise ConfigError(
                f"{folder}: {name}={value!r} is not supported; use a checkpoint with {name}={plain!r}"
            )
    check_only(folder, raw, "layer_types", "full_attention")


def check_only(folder: Path, raw: Mapping[str, Any], name: str, known: str) -> None:
    """Raise ConfigError if a field is a list with anything else than `known`."""
    value = raw.get(name)
    if value is not None and (not isinstance(value, list) or any(item != known for item in value)):
        raise ConfigError(
            f"{folder}: {name}={value!r} is not supported; use a checkpoint with only {known!r}"
        )


def rope_settings(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embeddings, which config.json has in up to three places, with the
    precedence of transformers."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{folder}: config.json's {field} is {rope!r}, not an object; {REMEDY}")
    longest = "original_max_position_embeddings"
    outer = {longest: raw[longest]} if longest in raw else {}
    return {"rope_theta": raw["rope_theta"], longest: raw["max_position_embeddings"]} | rope | outer


def rope_factor(folder: Path, rope: Mapping[str, Any]) -> float | None:
    """Return the factor of Llama 3's scaling, or None for plain rotary embeddings.

    Raises ConfigError for any other kind of scaling.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{folder}: rope_type={kind!r} is not supported; use a checkpoint with default or llama3"
        )
    used = {"factor", *LLAMA3} if kind == "llama3" else {"original_max_position_embeddings"}
    for name in rope.keys() - used - {"rope_type", "type", "rope_theta"}:
        if rope[name] is not None and (name, rope[name]) != ("partial_rotary_factor", 1.0):
            raise ConfigError(
                f"{folder}: {name}={rope[name]!r} of rope_type={kind!r} is not supported; use a checkpoint "
                "without it"
            )
    if kind == "default":
        return None
    for name, known in LLAMA3.items():
        if rope.get(name) != known:
            raise ConfigError(
                f"{folder}: {name}={rope.get(name)} of rope_type=llama3 is not supported, megatron "
                f"computes with {known}; use a checkpoint that does too"
            )
    return rate_of(folder, rope, "factor")
