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
from typing import Any

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.families import FAMILIES, KINDS, TEXT_PARTS, WINDOWS, Family

REMEDY = "give model.path a Hugging Face checkpoint folder"


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
    "attn_output_gate": True,
    "output_gate_type": "silu",
}
# Fields beside text_config that are read, if text_config does not have them
OUTER = (
    "dtype",
    "torch_dtype",
    "transformers_version",
    "quantization_config",
    "compression_config",
    "tie_word_embeddings",
)
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
    raw = text_fields(folder, raw)
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"{folder}: model_type={name!r} is not supported; choose one of {sorted(FAMILIES)}")
    _check_plain(folder, raw, FAMILIES[name])
    return MISSING | dict(FAMILIES[name].missing) | raw


def text_fields(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model: those of text_config, if config.json is of a model with images.

    Fields that both parts may have are taken from text_config, as transformers' text model does. Raises
    ConfigError if it is missing, or if the two contradict each other.
    """
    if raw.get("model_type") not in TEXT_PARTS:
        return dict(raw)
    text, kind = raw.get("text_config"), TEXT_PARTS[raw["model_type"]]
    if not isinstance(text, dict):
        raise ConfigError(f"{folder}: config.json has no text_config; fetch the file again")
    if text.get("model_type", kind) != kind:
        raise ConfigError(
            f"{folder}: text_config.model_type={text['model_type']!r} is not supported with "
            f"model_type={raw['model_type']!r}; it must be {kind!r}"
        )
    outer = {name: raw[name] for name in OUTER if raw.get(name) is not None}
    for name in outer.keys() & text.keys() - {"dtype", "torch_dtype", "architectures"}:
        if text[name] not in (None, outer[name]):
            raise ConfigError(
                f"{folder}: config.json has {name}={outer[name]!r}, and {text[name]!r} in text_config; "
                "remove one of them"
            )
    own = {name: value for name, value in text.items() if value is not None}
    return outer | own | {"model_type": kind, "architectures": [FAMILIES[kind].architecture]}


def layer_kinds(folder: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return layer_types of a family with gated delta nets, or what follows from full_attention_interval.

    Raises ConfigError if the list has another length than the model has layers, or an unknown type.
    """
    layers, kinds = count_of(folder, given, "num_hidden_layers"), given.get("layer_types")
    if kinds is None:
        interval = count_of(folder, given, "full_attention_interval")
        return tuple(KINDS[(layer + 1) % interval > 0] for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise ConfigError(
            f"{folder}: layer_types={kinds!r} is not supported; it must have one of {[*KINDS]} for each of "
            f"the {layers} layers"
        )
    return tuple(kinds)


def window_kinds(folder: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of layers of a family with windows in turn. Raises ConfigError for other layer_types,
    which vLLM would not read."""
    layers, kinds = count_of(folder, given, "num_hidden_layers"), given.get("layer_types")
    known = tuple(WINDOWS[layer % 2] for layer in range(layers))
    if kinds is not None and (not isinstance(kinds, list) or tuple(kinds) != known):
        raise ConfigError(
            f"{folder}: layer_types={kinds!r} is not supported; it must have {[*WINDOWS]} in turn for the "
            f"{layers} layers"
        )
    return known


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
        remedy = "use the model's folder in bfloat16, or dequantise it"
        if family.stacked and method == "mxfp4":
            remedy = f"write them in bfloat16 with: megatron-stppo import-mxfp4 {folder} FOLDER"
        raise ConfigError(
            f"{folder}: quantization_config.quant_method={method!r} is not supported, the weights would be "
            f"read without their scales; {remedy}"
        )
    off = {"sliding_window"} - {family.sliding} | ({"qkv_bias"} if family.qkv_bias else set())
    off |= {"partial_rotary_factor", "mrope_section"} if family.delta_net else set()
    if raw.get("output_gate_type") == "swish":  # another name of silu
        off |= {"output_gate_type"}
    for name, plain in (PLAIN | dict(family.fixed)).items():
        value = raw.get(name)
        if value not in (None, plain) and name not in off:
            raise ConfigError(
                f"{folder}: {name}={value!r} is not supported; use a checkpoint with {name}={plain!r}"
            )
    if not family.delta_net and not family.sinks:
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
    if FAMILIES[raw["model_type"]].delta_net:
        rope = {"partial_rotary_factor": raw["partial_rotary_factor"], **_known(rope)}
    return {"rope_theta": raw["rope_theta"], longest: raw["max_position_embeddings"]} | rope | outer


def _known(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only position images, and without those that are null."""
    image = ("mrope_section", "mrope_interleaved")  # a text's three positions are equal
    return {name: value for name, value in rope.items() if name not in image and value is not None}


def rotary_share(folder: Path, rope: Mapping[str, Any], head_dim: int) -> float:
    """Return the share of a head that is rotated. Raises ConfigError unless that is an even number >= 2."""
    share = rate_of(folder, rope, "partial_rotary_factor") if "partial_rotary_factor" in rope else 1.0
    if share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
        raise ConfigError(
            f"{folder}: partial_rotary_factor={share} of head_dim={head_dim} is not supported; use a "
            "checkpoint that rotates whole pairs of elements"
        )
    return share


def rope_factor(folder: Path, rope: Mapping[str, Any], allow_partial: bool = False) -> float | None:
    """Return the factor of Llama 3's scaling, or None for plain rotary embeddings.

    allow_partial: whether only a share of a head may be rotated.

    Raises ConfigError for any other kind of scaling.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{folder}: rope_type={kind!r} is not supported; use a checkpoint with default or llama3"
        )
    used = {"factor", *LLAMA3} if kind == "llama3" else {"original_max_position_embeddings"}
    for name in rope.keys() - used - {"rope_type", "type", "rope_theta"}:
        partial = name == "partial_rotary_factor" and (rope[name] == 1.0 or allow_partial)
        if rope[name] is not None and not partial:
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
