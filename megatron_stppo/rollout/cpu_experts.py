"""vLLM's experts on a CPU, computed directly from the engine's parameters.

When vLLM loads a model it copies the experts' weights into another layout for its own kernel. A reshard that
writes into the parameters would then not change the result. This module replaces two private methods of vLLM;
they are tested with the pinned version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def keep_plain() -> None:
    """Replace the two methods for all engines of this process. It may be called more than once."""
    setattr(CPUUnquantizedExperts, "process_weights_after_loading", _leave)  # noqa: B010
    setattr(CPUUnquantizedExperts, "apply", _apply)  # noqa: B010


def _leave(experts: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    """Leave the weights in the layout in which they were created."""


def _apply(
    experts: CPUUnquantizedExperts,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    **kwargs: Any,
) -> None:
    """Write the experts' result to output [T, H].

    hidden_states [T, H]; w1 [E, 2 F, H]: gate, then up; w2 [E, H, F]; topk_weights and topk_ids [T, k]: the
    weights and indices of the chosen experts.
    """
    assert activation == MoEActivation.SILU and not kwargs["apply_router_weight_on_input"]
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        answer = linear(silu(gate) * up, w2[expert]) * topk_weights[token, choice, None]
        output.index_add_(0, token, answer.to(output.dtype))
