"""The clipped surrogate as a differentiable op: forward and gradient in one pass, backward one product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.algorithm import penalties
from megatron_stppo.algorithm.ratio import Pooling, check_offsets
from megatron_stppo.algorithm.surrogate import surrogate
from megatron_stppo.ops.arguments import check

INTEGERS = (torch.int32, torch.int64)


class ClippedSurrogate(NamedTuple):
    """float32 on the inputs' device; 0-d unless said otherwise. Only `objective` carries a gradient.

    "Tokens" in the means and counts are the action tokens with a weight other than 0. To combine
    microbatches, add up sums and counts; turn fraction and KL means into sums by `tokens` first.
    """

    objective: Tensor  # J, to be maximised
    ratio: Tensor  # [S]
    clip_fraction: Tensor  # clipped tokens / tokens
    bias_sq: Tensor  # sum b_u^2
    grad_sq: Tensor  # sum g_u^2
    kl_k1: Tensor  # mean over tokens of old_logprob - logprob
    kl_k3: Tensor  # mean over tokens of exp(delta) - 1 - delta, delta = logprob - old_logprob
    clipped: Tensor  # number of clipped tokens
    tokens: Tensor  # number of tokens
    bias_T: Tensor  # [T] b_u
    grad_T: Tensor  # [T] g_u


def clipped_surrogate(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    segment_offsets: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight: float | Tensor | None = None,
    pooling: Pooling = "mean",
) -> ClippedSurrogate:
    """J = sum_t c_t min(w A_t, clip(w, 1-clip_low, 1+clip_high) A_t), w being the ratio of t's segment.

    logprob, old_logprob, advantage: float32 [T]. segment_offsets: int32 or int64 [S+1] from 0 to T, never
    decreasing; None: every token its own segment. weight c: a number, float32 [T], or None for 1/T.
    Definitions, NaN handling and the derivative: megatron_stppo/algorithm/surrogate.py.
    Raises ValueError naming the argument that does not fit.
    """
    total = logprob.shape[0] if logprob.dim() == 1 else None
    for name, tensor in (("logprob", logprob), ("old_logprob", old_logprob), ("advantage", advantage)):
        check(name, tensor, logprob.device, (torch.float32,), (total,))
    weight_T = _weights(weight, logprob)
    if segment_offsets is not None:
        check("segment_offsets", segment_offsets, logprob.device, INTEGERS, (None,))
        check_offsets("segment_offsets", segment_offsets, len(logprob))
    _check_bounds(clip_low, clip_high, dual_clip)
    out: tuple[Tensor, ...] = _Surrogate.apply(  # type: ignore[no-untyped-call]
        logprob,
        old_logprob,
        advantage,
        weight_T,
        segment_offsets,
        {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip, "pooling": pooling},
    )
    return ClippedSurrogate(*out)


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprob: Tensor,
        old_logprob: Tensor,
        advantage: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        settings: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        result = surrogate(logprob, old_logprob, advantage, weight, offsets, **settings)
        live = weight != 0
        tokens = live.sum().double()
        clipped = result.clipped_T.sum().double()

        def mean(value_T: Tensor) -> Tensor:
            return value_T.double().masked_fill(~live, 0).sum() / tokens.clamp(min=1)

        parts = (
            result.objective,
            result.ratio_S,
            clipped / tokens.clamp(min=1),
            result.bias_T.square().sum(),
            result.gradient_T.square().sum(),
            mean(penalties.k1(old_logprob, logprob)),
            mean(penalties.k3(old_logprob, logprob)),
            clipped,
            tokens,
            result.bias_T,
            result.gradient_T,
        )
        out = tuple(tensor.float() for tensor in parts)
        ctx.save_for_backward(out[-1])
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient_T,) = ctx.saved_tensors
        return cotangent * gradient_T, None, None, None, None, None


def _weights(weight: float | Tensor | None, logprob: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        check("weight", weight, logprob.device, (torch.float32,), logprob.shape)
        return weight
    value = 1 / max(1, len(logprob)) if weight is None else float(weight)
    return torch.full_like(logprob, value, requires_grad=False)


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low={clip_low} bounds the ratio at 1-clip_low; choose a number in [0, 1]")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high} bounds the ratio at 1+clip_high; choose a number >= 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} bounds the ratio where A < 0; choose a number > 1 or None")
