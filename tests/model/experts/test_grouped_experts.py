"""All experts of a rank in one product: megatron's SequentialMLP, expert by expert, is the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks


def both(counts: list[int], dtype: torch.dtype, frozen: bool = False) -> list[dict[str, Tensor]]:
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.parallel import groups

    return compared(groups.initialize(ParallelConfig()), counts, dtype, frozen)


def compared(
    mesh: Any, counts: list[int], dtype: torch.dtype, frozen: bool = False, device: str = "cpu"
) -> list[dict[str, Tensor]]:
    """Return outputs and gradients of the grouped experts and of SequentialMLP, with the same weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_stppo.config import Config
    from megatron_stppo.model.build import transformer_config
    from megatron_stppo.model.experts.grouped_experts import GroupedExperts
    from megatron_stppo.weights.sharding.hf_names import ModelShape

    config = Config.model_validate({"model": {"path": "none"}})
    shape = ModelShape("qwen3_moe", 1, 16, 2, 2, 8, 24, 32, False, False, True, 1e6, 1e-6, 64)
    shape = replace(shape, experts=len(counts), experts_per_token=1, renormalised=False)
    settings = transformer_config(shape, config, mesh, dtype)
    parts = get_gpt_layer_local_spec(num_experts=len(counts)).submodules.mlp.submodules.experts.submodules
    ranks = ProcessGroupCollection.use_mpu_process_groups()
    found = []
    with torch.device(device):
        for kind in (GroupedExperts, SequentialMLP):
            torch.manual_seed(0)
            layer = kind(len(counts), settings, parts, ranks)
            for weight in layer.requires_grad_(not frozen).parameters():
                torch.nn.init.normal_(weight, std=0.3)
            rows = torch.randn(sum(counts), 16).to(dtype).requires_grad_()
            prob = torch.rand(sum(counts)).requires_grad_()
            out, bias = layer(rows, torch.tensor(counts, device="cpu"), prob)
            assert bias is None
            out.backward(torch.randn_like(out))
            assert rows.grad is not None and prob.grad is not None
            found.append({"out": out.detach(), "rows": rows.grad, "prob": prob.grad})
            found[-1] |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found


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
