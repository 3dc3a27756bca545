"""The kernels of flash-linear-attention and causal-conv1d for gated delta nets, on a GPU in bfloat16.

No kernel of flash-linear-attention's rule (0.6.0) adds atomically. Its block sizes are those that are fastest
where it first runs; Triton keeps the choice on the machine's disk. causal-conv1d adds the gradients of its
weight atomically, so that only its forward pass is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.attention import Sequences


@dataclass(frozen=True)
class Kernels:
    """fla_rule: chunk_gated_delta_rule of flash-linear-attention. convolution: causal_conv1d_fn, or None."""

    fla_rule: Callable[..., Any]
    convolution: Callable[..., Tensor] | None

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequences: Sequences) -> Tensor:
        """Return o [P, value heads, V], as gated_delta_rule of normalised q / sqrt(K) and normalised k.

        q, k [P, key heads, K] and v [P, value heads, V] in bfloat16; g and beta [P, value heads] in float32.
        """
        each = v.shape[1] // k.shape[1]  # repeated here: earlier versions of the rule want equal heads
        q, k = (x.repeat_interleave(each, 1) for x in (q, k))
        q, k, v, g, beta = (x.contiguous()[None] for x in (q, k, v, g, beta))
        o, _ = self.fla_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=q.shape[-1] ** -0.5,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequences.starts,
        )
        out: Tensor = o[0]
        return out

    def convolve(self, x: Tensor, weight: Tensor, number_P: Tensor) -> Tensor | None:
        """Return what Convolution does of x [P, C] and weight [C, 1, width]; None if causal-conv1d cannot.

        number_P: int32, the number of each token's sequence.
        """
        if self.convolution is None or x.shape[1] % 8 or not 2 <= weight.shape[2] <= 4:
            return None
        # sequences need the channels last: [1, C, P] with stride 1 between channels
        across = x.contiguous()[None].transpose(1, 2)
        return self.convolution(across, weight[:, 0], seq_idx=number_P[None])[0].t()


def chosen(config: Config, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels that model.delta_net chooses; None for torch's operations.

    Raises ConfigError if it is fla, and that is not installed or cannot run.
    """
    if config.model.delta_net == "torch":
        return None
    if missing := _missing(dtype):
        raise ConfigError(f"model.delta_net=fla: {missing}; choose torch")
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    if importlib.util.find_spec("causal_conv1d") is None:
        return Kernels(rule, None)
    return Kernels(rule, importlib.import_module("causal_conv1d").causal_conv1d_fn)


def _missing(dtype: torch.dtype) -> str:
    """Return why the kernels cannot run, or an empty string."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if dtype != torch.bfloat16:
        return f"its kernels are for bfloat16, the model has {str(dtype).removeprefix('torch.')}"
    return "" if importlib.util.find_spec("fla") else "flash-linear-attention is not installed"
