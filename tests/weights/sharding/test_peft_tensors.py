"""Matrices in the format of the package `peft` that are not finite or cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

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
    (tmp_path / "cut").mkdir()
    whole = (tmp_path / "good" / FILE).read_bytes()
    (tmp_path / "cut" / FILE).write_bytes(whole[:-1])
    for rank, good in enumerate((whole, whole[:-1] + b"?")):  # the last byte is one of a number
        (tmp_path / f"of rank {rank}").mkdir()
        (tmp_path / f"of rank {rank}" / FILE).write_bytes(good)
    said = run_ranks(import_matrices, 2, tmp_path)
    assert said[0] == said[1]
    rounded, not_finite, cut, nowhere, two, digest = (
        text.removeprefix(f"model.lora.path={tmp_path}/") for text in said[0]
    )
    wrong = "has numbers that are not finite in"
    assert rounded == f"good: {KEY.format(0)} {wrong} float16; write the adapter again"
    assert not_finite == f"bad: {KEY.format(1)} {wrong} float32; write the adapter again"
    assert cut.startswith(f"cut: {FILE} cannot be read (") and cut.endswith("); write the adapter again")
    assert nowhere.startswith(f"nowhere: {FILE} cannot be read ([Errno 2] No such file or directory: ")
    assert (
        two
        == f"two: {FILE} is not the same on all nodes; copy one folder to all of them, or use a shared one"
    )
    assert digest == hashlib.sha256(whole).hexdigest()
