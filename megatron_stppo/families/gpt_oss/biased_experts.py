"""Experts with biases and a clamped SwiGLU, whose projection has the rows of gate and up in turn.

megatron has such experts without tensor parallelism only: it would add the bias of the second layer once per
tensor rank. It also divides the rows into a half of gates and a half of ups.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from megatron_stppo.model.experts.grouped_experts import LINEAR, GroupedExperts, products
from megatron_stppo.ops.clamped_swiglu import clamped_swiglu
from megatron_stppo.ops.transfer import to_device


class BiasedExperts(GroupedExperts):
    """The parameters are those of megatron's SequentialMLP with biases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:  # for checkpoints: megatron would cut the rows into two halves
            expert.config = copy.copy(expert.config)
            expert.config.gated_linear_unit = False

    def forward(self, rows_NH: Tensor, tokens_per_expert: Tensor, prob_N: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs [N, H] times the probabilities, of which each tensor rank has a part.

        rows_NH: sorted by expert. tokens_per_expert: int64 [E], on the host.
        """
        counts, prob_N1 = tokens_per_expert.tolist(), prob_N[:, None]
        end_E = to_device(tokens_per_expert.cumsum(0).int(), rows_NH.device)
        down, up = LINEAR
        inner = self._multiply(rows_NH, end_E, up, counts) + self._biases(up, counts)
        high = torch.promote_types(inner.dtype, torch.float32)  # rounded once, as in vLLM's kernel
        inner = (clamped_swiglu(inner.to(high)) * prob_N1).to(rows_NH.dtype)
        out = self._multiply(inner, end_E, down, counts)
        # the tensor ranks' outputs are added up
        out = out + self._biases(down, counts) * (prob_N1 / self.tp_group.size())
        return out.to(rows_NH.dtype), None

    def _multiply(self, rows: Tensor, end_E: Tensor, name: str, counts: list[int]) -> Tensor:
        """Return each row times the transpose of its expert's weight. torch has no grouped product in
        float64."""
        weights = self.weights(name)
        if len(weights) > 1 and len(rows) and rows.dtype != torch.float64:
            adds = self.config.gradient_accumulation_fusion
            return products(rows, end_E, weights, counts if adds else None)
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([linear(part, weight) for part, weight in parts])

    def _biases(self, name: str, counts: list[int]) -> Tensor:
        """Return [N, O]: the bias of each row's expert."""
        biases = [getattr(expert, name).bias for expert in self.local_experts]
        found: Tensor = _OfRows.apply(torch.stack(biases), counts)
        return found


class _OfRows(Function):
    """Biases [E, O] -> rows [N, O]. Gradients are added up in float32 or better, in order."""

    @staticmethod
    def forward(ctx: Any, bias_EO: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        repeats = to_device(torch.tensor(counts), bias_EO.device)
        return bias_EO.repeat_interleave(repeats, 0, output_size=sum(counts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        high = torch.promote_types(gradient.dtype, torch.float32)
        sums = [part.sum(0, dtype=high) for part in gradient.split(ctx.counts)]
        return torch.stack(sums).to(gradient.dtype), None
