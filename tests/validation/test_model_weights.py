"""The tensors of a folder must be those of its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_stppo.config import ConfigError
from megatron_stppo.validation.model_folder import check_weights
from megatron_stppo.weights.sharding.hf_files import INDEX
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD
from tests.weights.reshard.pieces import checkpoint, model_shape

SHAPE = model_shape(tied=True)
UP = "model.layers.0.mlp.up_proj.weight"


def found(folder: Path, held: dict[str, torch.Tensor], critic: bool = False) -> str:
    """Return the message about a folder with these tensors, or ""."""
    save_file(held, folder / "model.safetensors")
    try:
        check_weights("model.path", folder, SHAPE, critic)
    except ConfigError as error:
        return str(error).removeprefix(f"model.path={folder}: ")
    return ""


@pytest.mark.parametrize(
    "key", [UP, EMBEDDING, "model.norm.weight", "model.layers.3.self_attn.k_norm.weight"]
)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_tensor_with_more_or_fewer_rows_is_refused(tmp_path: Path, key: str, more: int) -> None:
    held = checkpoint(SHAPE)
    size = [*held[key].shape]
    held[key] = torch.zeros(size[0] + more, *size[1:])
    expected = f"tensor {key!r} has shape {[*held[key].shape]}, its config.json gives {size}; correct"
    assert found(tmp_path, held).startswith(expected)


def test_a_tensor_that_nothing_reads_is_refused_and_a_missing_one_too(tmp_path: Path) -> None:
    held, bias = checkpoint(SHAPE), "model.layers.1.self_attn.q_proj.bias"
    assert found(tmp_path, held) == ""
    assert found(tmp_path, held | {bias: torch.zeros(8)}).startswith(f"tensor {bias!r} (1 in all) does not")
    del held[UP]
    assert found(tmp_path, held).startswith(f"has no tensor {UP!r} (1 of {len(held) + 1} are missing); ")


def test_buffers_that_transformers_computes_again_are_ignored(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    assert found(tmp_path, checkpoint(SHAPE) | buffer) == ""


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_quantised_tensor_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    held = checkpoint(SHAPE)
    held[UP] = held[UP].to(dtype)
    assert f"tensor {UP!r} has type " in found(tmp_path, held)


def test_a_head_beside_tied_embeddings_must_be_a_copy_of_them(tmp_path: Path) -> None:
    """As Qwen3-0.6B has it. transformers does not tie a head that differs."""
    held = checkpoint(SHAPE)
    assert found(tmp_path, held | {HEAD: held[EMBEDDING].clone()}) == ""
    other = held[EMBEDDING].clone()
    other[-1, -1] += 1
    assert found(tmp_path, held | {HEAD: other}).startswith(
        "tie_word_embeddings=true, but 'lm_head.weight' differs from 'model.embed_tokens.weight'; set "
    )


def test_the_head_of_a_critics_folder_may_be_missing_or_another_one(tmp_path: Path) -> None:
    held = checkpoint(SHAPE)
    for head in ({}, {"score.weight": torch.zeros(1, 8)}, {HEAD: torch.zeros(5, 5)}):
        assert found(tmp_path, held | head, critic=True) == ""


def test_the_index_and_its_files_must_list_the_same_tensors(tmp_path: Path) -> None:
    held = checkpoint(SHAPE)
    save_file(held, tmp_path / "model-1.safetensors")
    names = dict.fromkeys(held, "model-1.safetensors")
    for changed, message in (
        (names | {"more": "model-1.safetensors"}, "no file has the tensor 'more' of model.safetensors.index"),
        (
            {k: v for k, v in names.items() if k != UP},
            f"holds the tensor '{UP}', which model.safetensors.index",
        ),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ConfigError, match=message):
            check_weights("model.path", tmp_path, SHAPE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    check_weights("model.path", tmp_path, SHAPE)
    save_file(held | {"more": torch.zeros(1)}, tmp_path / "model.safetensors")  # which transformers prefers
    with pytest.raises(ConfigError, match="tensor 'more'"):
        check_weights("model.path", tmp_path, SHAPE)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    assert found(tmp_path, checkpoint(SHAPE)) == ""
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        check_weights("model.path", tmp_path, SHAPE)
