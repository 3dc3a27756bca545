"""The fields of config.json that change what a model computes. They are read as transformers reads them, or
refused. What only one family has is in megatron_stppo/families/.

tests/weights/sharding/test_hf_fields.py compares the tables with the classes of transformers. Some refused
fields are read by vLLM only.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError

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
# In the scaled rotary embeddings SCALED, these values are constants of megatron; only the factor can be set.
SCALED = "llama3"
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(folder: Path) -> dict[str, Any]:
    """Return the fields of folder/config.json as they are. Raises ConfigError if they cannot be read."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder}: config.json unreadable ({error.strerror}); {REMEDY}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{folder}: config.json is not JSON in UTF-8 ({error}); {REMEDY}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{folder}: config.json holds {type(raw).__name__}, not an object; {REMEDY}")
    return raw


def text(folder: Path, raw: Mapping[str, Any], kind: str, architecture: str) -> dict[str, Any]:
    """Return the fields of the text part of a model with images. kind: the text part's model_type.

    Fields that both parts may have are taken from text_config, as transformers' text model does. Raises
    ConfigError if it is missing, or if the two contradict each other.
    """
    text = raw.get("text_config")
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
    return outer | own | {"model_type": kind, "architectures": [architecture]}


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


def check_quantised(folder: Path, raw: Mapping[str, Any], importers: Mapping[str, str]) -> None:
    """Raise ConfigError for quantised weights. importers: {method: script that decodes them}."""
    quantised = raw.get("quantization_config") or raw.get("compression_config")
    if not quantised:
        return
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    remedy = "use the model's folder in bfloat16, or dequantise it"
    if script := importers.get(str(method)):
        remedy = f"write them in bfloat16 with: python {script} {folder} FOLDER"
    raise ConfigError(
        f"{folder}: quantization_config.quant_method={method!r} is not supported, the weights would be "
        f"read without their scales; {remedy}"
    )


def check_plain(
    folder: Path, raw: Mapping[str, Any], fixed: Mapping[str, Any], unchecked: frozenset[str]
) -> None:
    """Raise ConfigError if a field has a value with which the model would compute something else."""
    if raw.get("output_gate_type") == "swish":  # another name of silu
        unchecked |= {"output_gate_type"}
    for name, plain in (PLAIN | dict(fixed)).items():
        value = raw.get(name)
        if value not in (None, plain) and name not in unchecked:
            raise ConfigError(
                f"{folder}: {name}={value!r} is not supported; use a checkpoint with {name}={plain!r}"
            )


def check_only(folder: Path, raw: Mapping[str, Any], name: str, known: str) -> None:
    """Raise ConfigError if a field is a list with anything else than `known`."""
    value = raw.get(name)
    if value is not None and (not isinstance(value, list) or any(item != known for item in value)):
        raise ConfigError(
            f"{folder}: {name}={value!r} is not supported; use a checkpoint with only {known!r}"
        )


def rope_settings(
    folder: Path,
    raw: Mapping[str, Any],
    own: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the settings of the rotary embeddings, which config.json has in up to three places, with the
    precedence of transformers. own: ModelShape.own_rope of the family."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{folder}: config.json's {field} is {rope!r}, not an object; {REMEDY}")
    longest = "original_max_position_embeddings"
    outer = {longest: raw[longest]} if longest in raw else {}
    plain = {"rope_theta": raw["rope_theta"], longest: raw["max_position_embeddings"]}
    return plain | dict(own(raw, rope)) | outer


def rope_factor(folder: Path, rope: Mapping[str, Any], allow_partial: bool = False) -> float | None:
    """Return the factor of SCALED rotary embeddings, or None for plain ones.

    allow_partial: whether only a share of a head may be rotated.

    Raises ConfigError for any other kind of scaling.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", SCALED):
        raise ConfigError(
            f"{folder}: rope_type={kind!r} is not supported; use a checkpoint with default or {SCALED}"
        )
    used = {"factor", *SCALING} if kind == SCALED else {"original_max_position_embeddings"}
    for name in rope.keys() - used - {"rope_type", "type", "rope_theta"}:
        partial = name == "partial_rotary_factor" and (rope[name] == 1.0 or allow_partial)
        if rope[name] is not None and not partial:
            raise ConfigError(
                f"{folder}: {name}={rope[name]!r} of rope_type={kind!r} is not supported; use a checkpoint "
                "without it"
            )
    if kind == "default":
        return None
    for name, known in SCALING.items():
        if rope.get(name) != known:
            raise ConfigError(
                f"{folder}: {name}={rope.get(name)} of rope_type={SCALED} is not supported, megatron "
                f"computes with {known}; use a checkpoint that does too"
            )
    return rate_of(folder, rope, "factor")
