"""megatron's local experts with one product of matrices for all experts of a rank, instead of one for each.

An expert gets few tokens, so that most of the time of separate products is the start of kernels: on an H100
two layers of Qwen3-30B-A3B reached 3 % of the rate of large products (docs/gpu.md). torch's fast kernel
needs bfloat16 and a GPU of compute capability 9.0 or 10.0. Elsewhere torch computes one product after the
other, and on other GPUs the host waits for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megatron_stppo.ops.transfer import to_device


class GroupedExperts(SequentialMLP):
    """The parameters are those of SequentialMLP, so checkpoints and the reshard do not change."""

    def forward(
        self, rows_NH: Tensor, tokens_per_expert: Tensor, prob_N: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs [N, H] times the probabilities; there is no bias.

        rows_NH: sorted by expert. tokens_per_expert: int64 [E], on the host.
        """
        if self.num_local_experts == 1 or not len(rows_NH):
            return super().forward(rows_NH, tokens_per_expert, prob_N)
        end_E = to_device(tokens_per_expert.cumsum(0).int(), rows_NH.device)
        up, down = (
            [getattr(expert, name).weight for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        gate, linear = products(rows_NH, end_E, up).chunk(2, dim=-1)
        inner = self.config.activation_func(gate) * linear * prob_N[:, None]
        return products(inner.to(rows_NH.dtype), end_E, down), None


def products(rows_NI: Tensor, end_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return [N, O]: each row times the transpose of its expert's weight [O, I].

    end_E: int32 [E], where the rows of each expert end. I and O numbers must take a multiple of 16 bytes.
    """
    result: Tensor = _Products.apply(rows_NI, end_E, *weights)
    return result


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, end_E: Tensor, *weights: Tensor) -> Tensor:
        trained = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(rows_NI if trained else None, end_E, *weights)
        return grouped_mm(rows_NI, torch.stack(weights).transpose(1, 2), offs=end_E)

    @staticmethod
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, end_E, *weights = ctx.saved_tensors
        gradient_NO = gradient_NO.contiguous()
        # stacked again, because a copy of all experts' weights per layer would be kept until here
        of_rows = grouped_mm(gradient_NO, torch.stack(weights), offs=end_E)
        of_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if rows_NI is not None:
            of_weights = grouped_mm(gradient_NO.t(), rows_NI, offs=end_E).unbind()
        return of_rows, None, *of_weights
