"""All experts of a rank in one product: megatron's SequentialMLP, expert by expert, is the definition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks

COUNTS = [3, 0, 5, 8]  # rows of each expert


def both(counts: list[int], dtype: torch.dtype, frozen: bool = False) -> list[dict[str, Tensor]]:
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.parallel import groups

    return compared(groups.initialize(ParallelConfig()), counts, dtype, frozen)


def layers_of(mesh: Any, experts: int, dtype: torch.dtype, kinds: Sequence[str], fused: bool = False) -> Any:
    """Return a layer of experts of each kind, GroupedExperts or SequentialMLP, with the same weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_stppo.config import Config
    from megatron_stppo.families.llama import Qwen3Moe
    from megatron_stppo.model.build import transformer_config
    from megatron_stppo.model.experts import GroupedExperts

    given = {"gradient_accumulation_fusion": fused}
    config = Config.model_validate({"model": {"path": "none"}, "megatron": given})
    shape = Qwen3Moe("qwen3_moe", 1, 16, 2, 2, 8, 24, 32, False, 1e6, 1e-6, 64)
    shape = replace(shape, experts=experts, experts_per_token=1, renormalised=False)
    settings = transformer_config(shape, config, mesh, dtype)
    parts = get_gpt_layer_local_spec(num_experts=experts).submodules.mlp.submodules.experts.submodules
    ranks = ProcessGroupCollection.use_mpu_process_groups()
    of = {"GroupedExperts": GroupedExperts, "SequentialMLP": SequentialMLP}
    layers = [of[kind](experts, settings, parts, ranks) for kind in kinds]
    for layer in layers:
        torch.manual_seed(0)
        for _, weight in sorted(layer.named_parameters()):
            torch.nn.init.normal_(weight, std=0.3)
    return layers


def compared(
    mesh: Any, counts: list[int], dtype: torch.dtype, frozen: bool = False, device: str = "cpu"
) -> list[dict[str, Tensor]]:
    """Return outputs and gradients of the grouped experts and of SequentialMLP, with the same weights."""
    found = []
    with torch.device(device):
        for layer in layers_of(mesh, len(counts), dtype, ("GroupedExperts", "SequentialMLP")):
            layer.requires_grad_(not frozen)
            torch.manual_seed(0)
            rows = torch.randn(sum(counts), 16).to(dtype).requires_grad_()
            prob = torch.rand(sum(counts)).requires_grad_()
            out, bias = layer(rows, torch.tensor(counts, device="cpu"), prob)
            assert bias is None
            out.backward(torch.randn_like(out))
            assert rows.grad is not None and prob.grad is not None
            found.append({"out": out.detach(), "rows": rows.grad, "prob": prob.grad})
            found[-1] |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found


class Moved(TorchDispatchMode):
    """Bytes of new tensors [E, O, I] that are copies of E tensors, and additions in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = self.additions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
        if copies and out.dim() == 3:  # torch's CPU kernel puts the rows of its products together, in 2
            self.stacked += out.nbytes
        self.additions += func in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm_.default)
        return out


def accumulated(dtype: torch.dtype, distributed: bool | None, fused: bool) -> dict[str, Any]:
    """Return what two micro-batches move, and their gradients by parameter: in main_grad ("mains"), as sums
    of those that autograd returns ("separate"), and in float64 ("exact", of linear_fc2 only).

    distributed: megatron's distributed optimizer, which moves the weights; None: the weights are not trained.
    """
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.parallel import groups

    return accumulated_in(groups.initialize(ParallelConfig()), dtype, distributed, fused)


def accumulated_in(mesh: Any, dtype: torch.dtype, distributed: bool | None, fused: bool) -> dict[str, Any]:
    """Do the same in groups that exist, on torch's default device."""
    from megatron_stppo.model.build import data_parallel
    from megatron_stppo.model.experts import join_weights

    counts = torch.tensor(COUNTS, device="cpu")
    (layer,) = layers_of(mesh, len(COUNTS), dtype, ("GroupedExperts",), fused)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    join_weights(layer)
    if distributed is None:
        layer.requires_grad_(False)
    else:
        data_parallel([layer], distributed)[0].zero_grad_buffer()
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())
    names = [name for name, _ in layer.named_parameters()]
    torch.manual_seed(1)
    pairs = [[torch.randn(sum(COUNTS), 16).to(dtype) for _ in "xg"] for _ in "12"]
    with Moved() as moved:
        for rows, given in pairs:
            layer(rows.requires_grad_(), counts, torch.ones(sum(COUNTS)))[0].backward(given)
    assert all(p.grad is None for p in layer.parameters())
    mains = {name: p.main_grad.clone() for name, p in layer.named_parameters() if hasattr(p, "main_grad")}
    (apart,) = layers_of(mesh, len(COUNTS), dtype, ("GroupedExperts",))  # neither joined nor in buffers
    exact = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in before.items()}
    separate = {name: torch.zeros(p.shape) for name, p in before.items()}
    for rows, given in pairs:
        apart(rows, counts, torch.ones(sum(COUNTS)))[0].backward(given)
        for name, p in apart.named_parameters():
            separate[name].add_(p.grad)
        apart.zero_grad()
        _add_exact(exact, before, rows.detach(), given)
    numbers = {"stacked": moved.stacked, "additions": moved.additions}
    return {"names": names, "moved": numbers, "mains": mains, "exact": exact, "separate": separate}


def _add_exact(
    exact: dict[str, Tensor], weights: dict[str, Tensor], rows_NH: Tensor, given_NH: Tensor
) -> None:
    """Add the gradients of linear_fc2 from the factors that the layer multiplies, in float64."""
    ends = [0, *itertools.accumulate(COUNTS)]
    for e, (a, b) in enumerate(itertools.pairwise(ends)):
        up = weights[f"local_experts.{e}.linear_fc1.weight"]
        gate, linear = (rows_NH[a:b] @ up.t()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * linear
        exact[f"local_experts.{e}.linear_fc2.weight"] += given_NH[a:b].double().t() @ inner.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [0, 0, 0, 7], [9], [0, 0]])
def test_outputs_and_gradients_are_those_of_separate_experts(counts: list[int], dtype: torch.dtype) -> None:
    grouped, separate = run_ranks(both, 1, counts, dtype)[0]
    assert grouped.keys() == separate.keys() and len(grouped) == 3 + 2 * len(counts)
    for name, expected in separate.items():
        far = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(grouped[name], expected, rtol=far, atol=far)
    empty = [e for e, count in enumerate(counts) if count == 0]
    assert not any(grouped[f"local_experts.{e}.linear_fc2.weight"].any() for e in empty)


def test_frozen_experts_pass_the_gradient_on_and_have_none() -> None:
    grouped, separate = run_ranks(both, 1, [3, 0, 5], torch.float32, True)[0]
    assert list(grouped) == list(separate) == ["out", "rows", "prob"]
    for name, expected in separate.items():
        torch.testing.assert_close(grouped[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("distributed", [True, False, None])
def test_neither_weights_nor_gradients_are_copied_together(distributed: bool | None) -> None:
    """Of a trained model with and without megatron's distributed optimizer, and of a reference."""
    found = run_ranks(accumulated, 1, torch.float32, distributed, False)[0]
    assert found["moved"] == {"stacked": 0, "additions": 0 if distributed is None else 4}
    assert sorted(found["names"]) == [
        f"local_experts.{e}.linear_fc{n}.weight" for e in range(len(COUNTS)) for n in (1, 2)
    ]


def test_gradients_in_main_gradients_have_the_bits_of_separate_additions() -> None:
    found = run_ranks(accumulated, 1, torch.float32, True, False)[0]
    assert found["mains"].keys() == found["separate"].keys()
    assert all(torch.equal(main, found["separate"][name]) for name, main in found["mains"].items())


def test_fused_gradients_of_experts_are_never_rounded_to_bfloat16() -> None:
    fused, plain = (run_ranks(accumulated, 1, torch.bfloat16, True, on)[0] for on in (True, False))
    for name, exact in fused["exact"].items():
        if exact.any():
            apart = [float((found["mains"][name] - exact).norm() / exact.norm()) for found in (fused, plain)]
            assert apart[0] < 1e-6 < 1e-3 < apart[1], (name, apart)
    assert fused["moved"]["stacked"] == 0


def test_only_tensors_at_equal_distances_in_one_storage_are_one_tensor() -> None:
    from megatron_stppo.model.experts import whole

    buffer = torch.arange(60.0)

    def at(*starts: int) -> list[Tensor]:
        return [buffer[start : start + 6].view(2, 3) for start in starts]

    together = whole(at(3, 11, 19))
    assert together is not None and torch.equal(together, torch.stack(at(3, 11, 19)))
    assert together.untyped_storage().data_ptr() == buffer.data_ptr()
    assert whole(at(3, 11, 20)) is None and whole(at(19, 11, 3)) is None and whole(at(3, 7, 11)) is None
    first, second = at(0, 6)
    assert whole([first, second.view(3, 2)]) is None and whole([first, second.view(3, 2).t()]) is None
    assert whole([first, first]) is None
    memory = bytearray(48)
    next_to = [torch.frombuffer(memory, dtype=torch.float32, count=6, offset=offset) for offset in (0, 24)]
    assert next_to[0].data_ptr() + 24 == next_to[1].data_ptr()
    assert whole(next_to) is None, "two storages that happen to follow each other"
