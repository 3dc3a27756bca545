"""Matrices in the format of the package `peft` that are not finite or cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.peft_tensors import check_one_file
from tests.ranks import run_ranks
from tests.weights.sharding.importing import import_matrices

KEY = "model.layers.{}.self_attn.o_proj.lora_A.weight"
FILE = "adapter_model.safetensors"


def test_all_ranks_refuse_a_matrix_of_one_rank_that_is_not_finite(tmp_path: Path) -> None:
    matrices = [torch.tensor([[0.0, 1e6, 2.0]]), torch.tensor([[0.0, 1e6, 3.0]])]
    for folder, last in (("good", matrices[1]), ("bad", torch.tensor([[float("nan"), 1.0, 1.0]]))):
        (tmp_path / folder).mkdir()
        named = {f"base_model.model.{KEY.format(n)}": x for n, x in enumerate((matrices[0], last))}
        save_file(named, tmp_path / folder / FILE)
    for folder, rows, columns in (
        ("smaller", 1, 2),
        ("larger", 2, 3),
    ):  # replaced after its shapes are checked
        (tmp_path / folder).mkdir()
        shapes = ((1, 3), (rows, columns))  # of ranks 0 and 1
        named = {f"base_model.model.{KEY.format(n)}": torch.ones(*size) for n, size in enumerate(shapes)}
        save_file(named, tmp_path / folder / FILE)
    (tmp_path / "cut").mkdir()
    whole = (tmp_path / "good" / FILE).read_bytes()
    (tmp_path / "cut" / FILE).write_bytes(whole[:-1])
    for rank, good in enumerate((whole, whole[:-1] + b"?")):  # the last byte is one of a number
        (tmp_path / f"of rank {rank}").mkdir()
        (tmp_path / f"of rank {rank}" / FILE).write_bytes(good)
    said = run_ranks(import_matrices, 2, tmp_path)
    assert said[0] == said[1]
    rounded, not_finite, cut, smaller, larger, nowhere, two, digest = (
        text.removeprefix(f"model.lora.path={tmp_path}/") for text in said[0]
    )
    wrong = "has numbers that are not finite in"
    assert rounded == f"good: {KEY.format(0)} {wrong} float16; write the adapter again"
    assert not_finite == f"bad: {KEY.format(1)} {wrong} float32; write the adapter again"
    assert cut.startswith(f"cut: {FILE} cannot be read (") and cut.endswith("); write the adapter again")
    for folder, message, held in (("smaller", smaller, [1, 2]), ("larger", larger, [2, 3])):
        line = f"{KEY.format(1)} has shape {held}, here it must be [1, 3]; start again with one file"
        assert message == f"{folder}: {line}"
    assert nowhere.startswith(f"nowhere: {FILE} cannot be read ([Errno 2] No such file or directory: ")
    assert two == f"two: {FILE} changed while the models were built; start again when it is complete"
    assert digest == hashlib.sha256(whole).hexdigest()


def test_actor_and_reference_must_begin_with_one_file() -> None:
    check_one_file(None, [None, None])
    check_one_file(Path("given"), ["ab", "ab"])
    with pytest.raises(ConfigError, match=r"path=given: adapter_model\.safetensors changed while the models"):
        check_one_file(Path("given"), ["ab", "ab", "cd"])
