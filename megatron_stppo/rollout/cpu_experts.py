"""vLLM's experts on a CPU, computed from the weights as they lie in the engine's parameters.

vLLM re-lays them out at load for a kernel of its own, so that what a reshard writes would not be what is
computed with. The two private methods replaced here are tested with the pinned version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def keep_plain() -> None:
    """For all engines of this process, once or more often."""
    setattr(CPUUnquantizedExperts, "process_weights_after_loading", _leave)  # noqa: B010
    setattr(CPUUnquantizedExperts, "apply", _apply)  # noqa: B010


def _leave(experts: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    """The weights stay as they were created."""


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
    """output [T, H] from hidden_states [T, H], w1 [E, 2 F, H] (gate, then up), w2 [E, H, F] and the chosen
    experts' weights and numbers [T, k]."""
    assert activation == MoEActivation.SILU and not kwargs["apply_router_weight_on_input"]
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        answer = linear(silu(gate) * up, w2[expert]) * topk_weights[token, choice, None]
        output.index_add_(0, token, answer.to(output.dtype))
