"""Names, rows and files of GPT-OSS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.families.gpt_oss import Yarn
from megatron_stppo.observe.throughput import mixing_flop
from megatron_stppo.validation.model_folder import check_weights
from megatron_stppo.validation.model_layout import check_engine, check_parallel
from megatron_stppo.weights.sharding.hf_checkpoint import load_hf
from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import as_stored, by_file
from megatron_stppo.weights.sharding.spans import serving_spans, whole_spans
from megatron_stppo.weights.sharding.tiles import PADDING

FIELDS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "sliding_window": 4,
    "vocab_size": 200,
}
STACKS = {
    "gate_up_proj": (3, 8, 48),
    "gate_up_proj_bias": (3, 48),
    "down_proj": (3, 24, 8),
    "down_proj_bias": (3, 8),
}


def config(folder: Path, **sections: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(FIELDS))
    model = {"path": str(folder), **sections.pop("model", {})}
    return Config.model_validate({"model": model, **sections})


def test_a_folder_with_all_experts_in_one_tensor_is_read_and_written_bitwise(tmp_path: Path) -> None:
    shape = read_shape(config(tmp_path).model.path)
    shapes, generator = hf_shapes(shape), torch.Generator().manual_seed(0)
    stacked = {
        f"model.layers.{n}.mlp.experts.{name}": size for n in range(2) for name, size in STACKS.items()
    }
    plain = {name: size for name, size in shapes.items() if ".experts." not in name}
    given = {name: torch.randn(size, generator=generator) for name, size in (plain | stacked).items()}
    save_file(given, tmp_path / "model.safetensors")
    check_weights("model.path", tmp_path, shape)
    found = {name: torch.empty(size) for name, size in shapes.items()}
    load_hf(tmp_path, shape, whole_spans(shape, shapes), found)
    at = "model.layers.1.mlp.experts."
    assert torch.equal(found[f"{at}2.gate_up.weight"], given[f"{at}gate_up_proj"][2].t())
    assert torch.equal(found[f"{at}1.down.bias"], given[f"{at}down_proj_bias"][1])
    again = as_stored(shape, found)
    assert {name: x.tolist() for name, x in again.items()} == {name: x.tolist() for name, x in given.items()}
    save_file(again, tmp_path / "again.safetensors")
    assert load_file(tmp_path / "again.safetensors").keys() == given.keys()
    files = by_file(shape, shapes, torch.float32, limit=1)  # one stack in each file
    assert [*map(len, files.values())].count(3) == 8 and sum(map(len, files.values())) == len(shapes)


def test_the_first_engine_rank_has_the_biases_that_vllm_adds_up(tmp_path: Path) -> None:
    shape = read_shape(config(tmp_path).model.path)
    name = "model.layers.0.mlp.experts.routed_experts.w2_bias.1"
    own = [serving_spans(shape, 2, tensor)[name] for tensor in (0, 1)]
    assert [span.hf_key for (span,) in own] == ["model.layers.0.mlp.experts.1.down.bias", PADDING]
    rows = serving_spans(shape, 2, 1)["model.layers.0.mlp.experts.routed_experts.w13_weight.1"]
    assert [(span.dim, span.start, span.size) for span in rows] == [(0, 24, 24)]
    assert "model.layers.0.attn.sinks" in serving_spans(shape, 2, 1)


@pytest.mark.parametrize("truncate", [False, True])
def test_frequencies_are_those_of_transformers(truncate: bool) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "truncate": truncate}
    found = Yarn(32.0, 32.0, 1.0, 4096.0, truncate)
    theirs, scale = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(rope_parameters=rope), torch.device("cpu"))
    assert found.scale == scale
    torch.testing.assert_close(torch.tensor(found.frequencies(150_000.0, 64)), theirs, rtol=2e-6, atol=0)


def test_a_window_bounds_the_products_of_attention(tmp_path: Path) -> None:
    """Of 6 tokens, those of the window of 4 see 1, 2, 3, 4, 4, 4, counted as 16 / 2 + 2 * 4."""
    shape = read_shape(config(tmp_path).model.path)
    assert mixing_flop(shape, [6]) == 2 * 4 * 4 * (36 + (36 - 4))


@pytest.mark.parametrize(
    ("sections", "world", "message"),
    [
        (
            {"model": {"layers": "transformer_engine"}},
            1,
            "transformer_engine: only local layers have .* sinks",
        ),
        ({"parallel": {"tensor": 2}}, 2, "parallel.sequence=false"),
        ({"rollout": {"engine_tensor": 4}}, 4, "engine_tensor=4 exceeds model.num_key_value_heads=2"),
        (
            {"rollout": {"vllm": {"attention_backend": "FLASHINFER"}}},
            1,
            "attention_backend=FLASHINFER: follows from model_type=gpt_oss",
        ),
        ({}, 5, "intermediate_size=24: vLLM's gpt_oss needs a multiple of the number of ranks 5"),
    ],
)
def test_what_does_not_work_is_refused(
    tmp_path: Path, sections: dict[str, Any], world: int, message: str
) -> None:
    given = config(tmp_path, **sections)
    with pytest.raises(ConfigError, match=message):
        check_parallel(given, world)
        check_engine(given, world)
