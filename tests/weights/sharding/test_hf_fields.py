"""The tables of config.json's fields follow the classes of transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_stppo.config import ConfigError
from megatron_stppo.families.gpt_oss import GptOss
from megatron_stppo.families.qwen3_next import MISSING as HYBRID
from megatron_stppo.families.qwen3_next import Hybrid
from megatron_stppo.weights.sharding.hf_fields import MISSING, PLAIN, SCALING
from megatron_stppo.weights.sharding.hf_names import families, read_shape

each_family = pytest.mark.parametrize("family", families())
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}
READ = {*SIZES, *MISSING, *HYBRID, "num_experts", "num_local_experts", "rope_parameters", "layer_types"}
UNUSED = {  # fields that do not change the log-probs of a model that is evaluated
    "attention_dropout",  # applied in training by transformers only; here there is no dropout
    "initializer_range",
    "max_window_layers",  # of sliding windows, which are refused
    "output_router_logits",
    "pretraining_tp",
    "router_aux_loss_coef",
    "use_cache",
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}

YARN = GptOss.missing["rope_parameters"]


def read(folder: Path, family: str, **fields: Any) -> Any:
    kind = families()[family]
    experts = {"num_experts": 4} if kind.mixture else {}
    (folder / "config.json").write_text(json.dumps({"model_type": family} | SIZES | experts | fields))
    return read_shape(folder)


@each_family
def test_every_field_of_a_family_is_read_or_refused_or_does_not_matter(family: str) -> None:
    kind = CONFIG_MAPPING[family]
    own = {field.name for field in dataclasses.fields(kind)}
    common = {field.name for field in dataclasses.fields(kind.__mro__[1])} - {"rope_parameters"}
    assert own - common - READ - PLAIN.keys() - families()[family].fixed.keys() - UNUSED == set()


@each_family
def test_a_missing_field_has_the_value_of_transformers(tmp_path: Path, family: str) -> None:
    shape, theirs = read(tmp_path, family), AutoConfig.from_pretrained(tmp_path)
    assert shape.kv_heads == theirs.num_key_value_heads
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert shape.norm_eps == theirs.rms_norm_eps
    assert shape.max_positions == theirs.max_position_embeddings
    assert shape.tied == theirs.tie_word_embeddings
    if shape.experts:
        assert shape.renormalised == getattr(theirs, "norm_topk_prob", True)
    if isinstance(shape, Hybrid):
        assert (net := shape.delta_net) is not None
        assert list(shape.kinds) == theirs.layer_types
        assert shape.rotary_share == theirs.rope_parameters["partial_rotary_factor"]
        assert (net.key_heads, net.value_heads) == (
            theirs.linear_num_key_heads,
            theirs.linear_num_value_heads,
        )
        assert (net.key_dim, net.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
        assert net.width == theirs.linear_conv_kernel_dim
    if isinstance(shape, GptOss):
        yarn, rope = shape.yarn, theirs.rope_parameters
        assert (yarn.factor, yarn.fast, yarn.slow) == (rope["factor"], rope["beta_fast"], rope["beta_slow"])
        assert (yarn.original, yarn.truncate) == (rope["original_max_position_embeddings"], rope["truncate"])
        windows = {"sliding_attention": theirs.sliding_window, "full_attention": 0}
        assert [mixer.window for mixer in shape.mixers] == [windows[kind] for kind in theirs.layer_types]
    if isinstance(shape, Hybrid) and shape.shared_ffn:
        assert shape.shared_ffn == theirs.shared_expert_intermediate_size


@each_family
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_the_rotary_base_is_read_where_transformers_reads_it(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    if family == "gpt_oss":  # which needs YaRN
        kept = {"rope_type", "type"}
        fields = {
            name: YARN | {k: v for k, v in of.items() if k not in kept} if isinstance(of, dict) else of
            for name, of in fields.items()
        }
    assert read(tmp_path, family, **fields).rope_theta == 5e5
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 5e5


SCALED = {"rope_type": "llama3", "factor": 8.0, **SCALING}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 of rope_type='default' is not supported; use a checkpoint without it",
        ),
        ("qwen2", {"rope_scaling": {"mrope_section": [1, 2]}}, r"mrope_section=\[1, 2\] of rope_type="),
        ("llama", {"rope_scaling": SCALED | {"factor": None}}, "factor is None, not above 0"),
        ("llama", {"rope_scaling": SCALED, "original_max_position_embeddings": 4096}, "=4096 of rope_type"),
        ("qwen2", {"head_dim": 32}, "head_dim=32 of model_type='qwen2' .* vLLM computes with .* = 16"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("mixtral", {"sliding_window": 8, "use_sliding_window": False}, "sliding_window=8 is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use a checkpoint with only 'full_attention'"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "python .*import_mxfp4.py .* FOLDER"),
        ("gpt_oss", {"attention_bias": False}, "use a checkpoint with attention_bias=True"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "use a checkpoint with swiglu_limit=7.0"),
        ("gpt_oss", {"tie_word_embeddings": True}, "use a checkpoint with tie_word_embeddings=False"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is missing"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "it must have .*'sliding_attention', 'full"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "default"}}, "rope_type='default' is not supported for"),
        ("gpt_oss", {"rope_scaling": YARN | {"mscale": 2.0}}, "mscale=2.0 of rope_type='yarn' is not"),
        ("gpt_oss", {"rope_scaling": YARN | {"beta_fast": None}}, "beta_fast is None, not above 0"),
        ("llama", {"qkv_bias": True}, "qkv_bias=True is not supported"),  # only vLLM reads it
        ("llama", {"is_causal": False}, "is_causal=False is not supported"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, not above 0"),
        ("qwen3_moe", {"num_local_experts": 8}, "has num_experts=4 and num_local_experts=8; remove one"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' is not supported"),
    ],
)
def test_a_field_that_changes_the_computation_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, family, **fields)


def test_a_mixtral_always_renormalises(tmp_path: Path) -> None:
    """transformers has no norm_topk_prob for it."""
    assert read(tmp_path, "mixtral", norm_topk_prob=False).renormalised
