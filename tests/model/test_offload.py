"""Offloading memory between steps changes no bit of the steps, and really frees the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.model import offload
from megatron_stppo.model.offload import Storages
from tests.ranks import run_ranks
from tests.training.update import layouts

STEPS = 2


def bytes_of(tensors: Any) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def steps(model: str, offload: str, name: str) -> tuple[list[float], list[int]]:
    """Return (checksums of the state after a step, bytes on the device: weights, states, gradients)."""
    process.prepare(engine=False)
    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.offload import Offloader
    from megatron_stppo.model.pipeline import packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.weights.sharding.hf_names import read_shape

    section = {"actor": layouts.SETTINGS, "critic": layouts.SETTINGS}
    config = Config.model_validate({"model": {"path": model}, "update": section})
    mesh, shape, dtype = groups.initialize(config.parallel), read_shape(Path(model)), getattr(torch, name)
    actor = build.trainer("actor", shape, config, mesh, dtype)
    reference = build.from_hf("reference", shape, config, mesh, dtype)
    offloader = Offloader({"actor": actor}, reference, offload)
    a, packer = config.algorithm, packer_of(config, shape, mesh)
    head = PolicyHead.of(actor.model, mesh, shape.vocab, segments=a.segments)
    batch, sums, sizes = layouts.batch(), [], []
    every = packer.whole(batch)
    weights = [p for model in (actor.chunks, reference) for chunk in model for p in chunk.parameters()]
    for _ in range(STEPS):
        offloader.to("rollout")
        own = {x.untyped_storage()._cdata for x in weights}
        states = [x for x in actor.states() if x.untyped_storage()._cdata not in own]
        sizes = [bytes_of(x) for x in (weights, states, actor.gradient_buffers())]
        offloader.to("update")
        loss = ActorLoss(batch, minibatch_weights(batch, every.chosen, a), a, head)
        sums.append(actor_step(actor, loss, every, packer).metrics["actor/gradient_norm"])
    offloader.to("score")
    offloader.to("checkpoint")
    sums += [float(x.double().sum()) for x in actor.states()]
    return sums + [float(p.double().sum()) for c in actor.chunks for p in c.parameters()], sizes


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_step_has_the_same_bits_with_any_offload(tmp_path: Path, name: str) -> None:
    layouts.write_model(tmp_path)
    modes = ("none", "optimizer", "all") if name == "bfloat16" else ("none", "all")
    runs = {mode: run_ranks(steps, 1, str(tmp_path), mode, name)[0] for mode in modes}
    sums, sizes = ({mode: run[part] for mode, run in runs.items()} for part in (0, 1))
    assert all(found == sums["none"] for found in sums.values())
    assert sizes["none"][0] > 0 and sizes["none"][2] > 0
    assert sizes.get("optimizer", [sizes["none"][0], 0, 0]) == [sizes["none"][0], 0, 0]
    assert sizes["all"] == [0, 0, 0]


def test_memory_that_is_not_kept_comes_back_as_zeros_and_views_stay_valid() -> None:
    base = torch.arange(6.0)
    view, kept = base[2:4], torch.arange(3.0)
    lost, held = Storages(lambda: [base, view], keep=False), Storages(lambda: [kept])
    for group in (lost, held):
        group.leave()
        group.leave()
    assert base.untyped_storage().nbytes() == kept.untyped_storage().nbytes() == 0
    for group in (lost, held):
        group.come()
    assert base.tolist() == [0.0] * 6 and kept.tolist() == [0.0, 1.0, 2.0]
    base[3] = 7
    assert view.tolist() == [0.0, 7.0]


def test_storages_are_cut_into_blocks_of_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 bytes in blocks of 8, 8, 8 and 2: the second storage begins in the first and ends in the last."""
    monkeypatch.setattr(offload, "LARGEST", 8)
    monkeypatch.setattr(offload, "SMALLEST", 2)
    assert offload.block_sizes(26) == [8, 8, 8, 2]
    assert offload.block_sizes(13) == [8, 4, 2]
    assert offload.block_sizes(0) == []
    tensors = [torch.arange(n, dtype=torch.uint8) + first for n, first in ((6, 0), (0, 0), (19, 50), (1, 9))]
    expected = [x.clone() for x in tensors]
    group = Storages(lambda: tensors)
    for _ in range(2):
        group.leave()
        assert [x.untyped_storage().nbytes() for x in tensors] == [0] * 4
        group.come()
        assert all(torch.equal(x, y) for x, y in zip(tensors, expected, strict=True))
        tensors[2] += 1
        expected[2] += 1
