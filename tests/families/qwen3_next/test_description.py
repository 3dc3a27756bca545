"""Rows of gated delta nets and gated attention, and folders with other names of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_stppo.config import ConfigError
from megatron_stppo.families.qwen3_next.delta_net import DeltaNet, merged
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation.model_folder import check_weights, left_out
from megatron_stppo.weights.sharding.hf_checkpoint import load_hf
from megatron_stppo.weights.sharding.hf_files import entries
from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import by_file
from megatron_stppo.weights.sharding.parts import TrainingRank
from megatron_stppo.weights.sharding.spans import training_spans
from megatron_stppo.weights.sharding.tiles import Span

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 200,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 4,
}
NEST = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def rows(spans: tuple[Span, ...]) -> list[tuple[str, int, int]]:
    return [(span.hf_key.removesuffix(".weight").removeprefix("x."), span.start, span.size) for span in spans]


def test_a_tensor_rank_has_the_rows_of_its_groups_one_after_another() -> None:
    """Each of two groups has a key head of 3 and two value heads of 5."""
    spans = DeltaNet(8, 2, 4, 3, 5, 4, joined=False).training_spans("x.", "", TrainingRank(Layout(2), 1))
    projected = rows(spans["in_proj.weight"])
    assert projected == [
        *(("in_proj_qkv", 3, 3), ("in_proj_qkv", 9, 3), ("in_proj_qkv", 22, 10)),
        *(("in_proj_z", 10, 10), ("in_proj_b", 2, 2), ("in_proj_a", 2, 2)),
    ]
    assert rows(spans["conv1d.weight"]) == [("conv1d", 3, 3), ("conv1d", 9, 3), ("conv1d", 22, 10)]
    assert rows(spans["A_log"]) == [("A_log", 2, 2)] and spans["out_proj.weight"][0][1:4] == (1, 10, 10)
    assert rows(spans["norm.weight"]) == [("norm", 0, 5)]


def test_joined_projections_are_read_group_by_group() -> None:
    net = DeltaNet(8, 2, 4, 3, 5, 4, joined=True)
    spans = net.training_spans("x.", "", TrainingRank(Layout(1), 0))
    assert rows(spans["in_proj.weight"]) == [
        *(("in_proj_qkvz", 0, 26), ("in_proj_ba", 0, 4)),
        *(("in_proj_qkvz", 26, 26), ("in_proj_ba", 4, 4)),
    ]
    assert rows(net.serving_spans("x.", 2, 1)["x.in_proj_qkvz.weight"]) == [("in_proj_qkvz", 26, 26)]


def test_the_engine_has_all_queries_of_a_rank_before_its_keys() -> None:
    spans = DeltaNet(8, 4, 8, 3, 5, 4, joined=False).serving_spans("x.", 2, 1)
    assert rows(spans["x.in_proj_qkvz.weight"]) == [
        *(("in_proj_qkv", 6, 6), ("in_proj_qkv", 18, 6), ("in_proj_qkv", 44, 20), ("in_proj_z", 20, 20))
    ]
    assert rows(spans["x.in_proj_ba.weight"]) == [("in_proj_b", 4, 4), ("in_proj_a", 4, 4)]


def test_parts_that_follow_each_other_are_one() -> None:
    assert merged([("x", 0, 2), ("x", 2, 3), ("y", 5, 1), ("x", 6, 1)]) == [
        *(("x", 0, 5), ("y", 5, 1), ("x", 6, 1))
    ]


def test_queries_of_a_group_come_before_their_gates(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, FIELDS))
    spans = training_spans(shape, Layout(2), 0)["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert [(span.hf_key.split(".")[-2], span.start, span.size) for span in spans] == [
        *(("q_proj", 0, 8), ("q_proj", 16, 8), ("q_proj", 8, 8), ("q_proj", 24, 8)),
        *(("k_proj", 0, 8), ("v_proj", 0, 8)),
    ]


def test_a_layer_has_the_tensors_of_its_kind(tmp_path: Path) -> None:
    names = hf_shapes(read_shape(write(tmp_path, FIELDS)))
    assert names["model.layers.0.linear_attn.conv1d.weight"] == (2 * 6 + 20, 1, 4)
    assert names["model.layers.1.self_attn.q_proj.weight"] == (2 * 32, 8)
    assert not any("layers.0.self_attn" in name or "layers.1.linear_attn" in name for name in names)


def test_a_file_in_bfloat16_has_four_bytes_for_each_decay(tmp_path: Path) -> None:
    shapes = {"x.A_log": (4,), "x.dt_bias": (4,)}
    shape = read_shape(write(tmp_path, FIELDS))
    assert [len(by_file(shape, shapes, torch.bfloat16, limit)) for limit in (24, 23)] == [1, 2]


def test_layers_without_a_list_follow_the_interval(tmp_path: Path) -> None:
    given = {name: value for name, value in FIELDS.items() if name != "layer_types"}
    shape = read_shape(write(tmp_path, given | {"num_hidden_layers": 8}))
    assert [layer for layer in range(8) if not shape.mixer(layer).recurrent] == [3, 7]
    assert shape.recurrent_layers == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must have one of .* for each of the 2 layers"),
        ({"layer_types": ["full_attention", "other"]}, "layer_types=.*'other'.* is not supported"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple of"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4 of head_dim=8 is not .* pairs"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported"),
    ],
)
def test_other_layers_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape(write(tmp_path, FIELDS | changes))


def test_the_text_part_of_a_model_with_images_is_read(tmp_path: Path) -> None:
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25} | sections
    plain = read_shape(write(tmp_path, FIELDS | {"rope_parameters": rope, "tie_word_embeddings": True}))
    text = FIELDS | {"rope_parameters": rope, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    nested = NEST | {"text_config": text, "tie_word_embeddings": True, "vision_config": {"depth": 1}}
    assert read_shape(write(tmp_path, nested)) == plain
    assert (plain.rope_theta, plain.rotary_share, plain.tied) == (1e7, 0.25, True)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=True, and False in text_config; remove one"):
        read_shape(write(tmp_path, nested | {"text_config": text | {"tie_word_embeddings": False}}))
    with pytest.raises(ConfigError, match=r"config.json has no text_config"):
        read_shape(write(tmp_path, NEST))


def test_a_folder_with_images_drafts_and_joined_experts_has_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, nested = write(tmp_path / "a", FIELDS), write(tmp_path / "b", NEST | {"text_config": FIELDS})
    shape, generator = read_shape(plain), torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) for name, size in hf_shapes(shape).items()}
    save_file(tensors, plain / "model.safetensors")
    other = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
        if ".experts." not in name
    }
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        of = [[tensors[f"{at}{n}.{p}_proj.weight"] for n in range(2)] for p in ("gate", "up", "down")]
        to = at.replace("model.", "model.language_model.", 1)
        other[f"{to}gate_up_proj"] = torch.cat([torch.stack(of[0]), torch.stack(of[1])], 1)
        other[f"{to}down_proj"] = torch.stack(of[2])
    extra = {
        "mtp.fc.weight": torch.zeros(2),
        "model.visual.a": torch.zeros(2),
        "model.visual.b": torch.zeros(2),
    }
    save_file(other | extra, nested / "model.safetensors")
    check_weights("model.path", nested, shape)
    assert "left out are 1 tensors mtp.* and 2 tensors model.visual.*" in left_out(nested, shape)
    assert left_out(plain, shape) == ""
    assert {key: entry.shape for key, entry in entries(nested, shape).items() if key in tensors} == hf_shapes(
        shape
    )
    spans = training_spans(shape, Layout(2), 1)
    found = []
    for folder in (plain, nested):
        empty = {
            name: torch.empty(_size(of, {key: tuple(t.shape) for key, t in tensors.items()}))
            for name, of in spans.items()
        }
        load_hf(folder, shape, spans, empty)
        found.append(empty)
    assert all(torch.equal(found[0][name], found[1][name]) for name in spans)


def _size(spans: tuple[Span, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a parameter that these spans tile."""
    key = next(span.hf_key for span in spans if span.hf_key)
    size, last = list(shapes[key]), spans[-1]
    size[last.dim] = last.local + last.size
    return tuple(size)
