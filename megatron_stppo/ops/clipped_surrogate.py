"""The clipped surrogate as a differentiable op.

The forward computes objective and gradient in one pass; the backward is one product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.algorithm import penalties
from megatron_stppo.algorithm.correction import squared_estimate
from megatron_stppo.algorithm.ratio import Pooling, check_offsets
from megatron_stppo.algorithm.surrogate import segment_sums, surrogate
from megatron_stppo.ops import extension
from megatron_stppo.ops.arguments import check

INTEGERS = (torch.int32, torch.int64)
MAX_BLOCKS = 2**31 - 1  # blocks of a GPU kernel; only tests change it, and results do not depend on it


class ClippedSurrogate(NamedTuple):
    """Outputs of `clipped_surrogate`: float32 on the inputs' device, 0-d unless a shape is given.

    Only `objective` carries a gradient. "Tokens" in the means and counts are the action tokens whose weight
    is not 0. To combine micro-batches, multiply the fraction and the KL means by `tokens`, then add up all
    sums and counts.
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
    logit_bias_sq: Tensor  # sum b_u^2 (1 - 2 p_u + sum p^2); 0 without sum_p_sq
    logit_grad_sq: Tensor  # the same of g_u
    grad_T: Tensor  # [T] g_u; read it only, a gradient of the objective may share its memory
    bias_T: Tensor | None  # [T] b_u; None unless `with_bias`


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
    sum_p_sq: Tensor | None = None,
    with_bias: bool = False,
    group: dist.ProcessGroup | None = None,
) -> ClippedSurrogate:
    """Return J = sum_t c_t min(w A_t, clip(w, 1-clip_low, 1+clip_high) A_t) and statistics of the clipping.

    w is the ratio of the segment of token t. Definitions, NaN handling and the derivative are in
    megatron_stppo/algorithm/surrogate.py.

    logprob, old_logprob, advantage: float32 [T].
    segment_offsets: int32 or int64 [S+1], from 0 to T, non-decreasing. None: every token is a segment.
    weight: c, a number, float32 [T], or None for 1/T.
    sum_p_sq: float32 [T] from vocab_logprob, needed for logit_bias_sq and logit_grad_sq.
    with_bias: whether to return bias_T.
    group: ranks that each hold a part of every segment (context parallelism); segment s is the same segment
    on all of them. The sums over segments are added up over the group by one all-reduce of [S, 4] float64
    before the exponential. The objective and all counts are this rank's share. Without segment_offsets the
    group has no effect.

    Raises ValueError that names the argument that does not fit. The extension on a GPU reads nothing back to
    the host, so for offsets that are out of order it does not raise: the objective is NaN and the other
    outputs are undefined.
    """
    total = logprob.shape[0] if logprob.dim() == 1 else None
    floats = {"logprob": logprob, "old_logprob": old_logprob, "advantage": advantage, "sum_p_sq": sum_p_sq}
    if isinstance(weight, Tensor):
        floats["weight"] = weight
    for name, tensor in floats.items():
        if tensor is not None:
            check(name, tensor, logprob.device, (torch.float32,), (total,))
    if segment_offsets is not None:
        check("segment_offsets", segment_offsets, logprob.device, INTEGERS, (None,))
    if weight is None:
        weight = 1 / max(1, len(logprob))
    _check_bounds(clip_low, clip_high, dual_clip)
    if pooling not in ("mean", "sum"):
        raise ValueError(f"pooling={pooling!r} is not known; choose mean or sum")
    compute = _extension if extension.serves(logprob.device) else _fallback
    with torch.no_grad():
        if not isinstance(weight, Tensor) and weight == 0:
            weight = torch.zeros_like(logprob)  # a tensor makes the kernels mask NaN
        inputs = _Inputs(logprob, old_logprob, advantage, weight, segment_offsets)
        settings = _Settings(clip_low, clip_high, dual_clip, pooling)
        whole = None
        if group is not None and segment_offsets is not None and dist.get_world_size(group) > 1:
            whole = _segment_sums(inputs, settings)
            dist.all_reduce(whole, group=group)
        out = compute(inputs, settings, sum_p_sq, with_bias, whole)
    objective: Tensor = _WithGradient.apply(logprob, out.objective, out.grad_T)  # type: ignore[no-untyped-call]
    return ClippedSurrogate(objective, *out[1:])


class _WithGradient(torch.autograd.Function):
    """The objective, with gradient_T as its derivative with respect to logprob."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, objective: Tensor, gradient_T: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_T)
        return objective.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_T,) = ctx.saved_tensors
        if cotangent.is_cpu and float(cotangent) == 1:  # reading it from a GPU would synchronize
            return gradient_T, None, None
        return cotangent * gradient_T, None, None


class _Inputs(NamedTuple):
    logprob: Tensor
    old_logprob: Tensor
    advantage: Tensor
    weight: float | Tensor
    offsets: Tensor | None

    @property
    def weight_T(self) -> Tensor:
        if isinstance(self.weight, Tensor):
            return self.weight
        return torch.full_like(self.logprob, float(self.weight))


class _Settings(NamedTuple):
    clip_low: float
    clip_high: float
    dual_clip: float | None
    pooling: Pooling


def _segment_sums(inputs: _Inputs, settings: _Settings) -> Tensor:
    """Return segment_sums of algorithm/surrogate.py for this rank's tokens, float64 [S, 4]."""
    if extension.serves(inputs.logprob.device):
        assert inputs.offsets is not None
        shape = (max(0, len(inputs.offsets) - 1), extension.SEGMENT_SUMS)
        part = torch.empty(shape, dtype=torch.float64, device=inputs.logprob.device)
        if len(part):  # an empty tensor is a null pointer, which selects the full computation
            _run(inputs, settings, part=part)
        return part
    _check_order(inputs)
    return segment_sums(*inputs[:3], inputs.weight_T, inputs.offsets)


def _extension(
    inputs: _Inputs, settings: _Settings, sum_p_sq: Tensor | None, with_bias: bool, whole: Tensor | None
) -> ClippedSurrogate:
    """Compute the outputs with csrc/clipped_surrogate_cpu.cpp or csrc/clipped_surrogate.cu."""
    logprob, offsets = inputs.logprob, inputs.offsets
    segments = len(logprob) if offsets is None else max(0, len(offsets) - 1)
    ratio, gradient = logprob.new_empty(segments), torch.empty_like(logprob)
    bias = torch.empty_like(logprob) if with_bias else None
    totals = logprob.new_empty(extension.SURROGATE_TOTALS)
    _run(inputs, settings, sum_p_sq, ratio, gradient, bias, totals, whole=whole)
    objective, *rest = totals.unbind()
    return ClippedSurrogate._make((objective, ratio, *rest, gradient, bias))


def _run(
    inputs: _Inputs,
    settings: _Settings,
    sum_p_sq: Tensor | None = None,
    *outputs: Tensor | None,
    part: Tensor | None = None,
    whole: Tensor | None = None,
) -> None:
    """Call the extension.

    outputs: ratio, gradient, bias and totals to be written; none of them if `part` is given. part: written
    with this rank's segment sums. whole: segment sums of all ranks.
    """
    logprob, old_logprob, advantage, weight, offsets = inputs
    total, segments = len(logprob), len(logprob) if offsets is None else len(offsets) - 1
    if segments < 0:
        _check_order(inputs)  # raises: the offsets are empty
    tiles = (total + (0 if offsets is None else segments)) // extension.SURROGATE_TILE + 1
    workspace = torch.empty(tiles * extension.SURROGATE_ROW, dtype=torch.float64, device=logprob.device)
    given = weight if isinstance(weight, Tensor) else None
    status = extension.run(
        "clipped_surrogate",
        logprob.device,
        *(logprob, old_logprob, advantage, given, sum_p_sq, None if offsets is None else offsets.long()),
        *(total, segments, 0.0 if given is not None else float(weight)),
        *(1 - settings.clip_low, 1 + settings.clip_high),
        math.inf if settings.dual_clip is None else settings.dual_clip,
        settings.pooling == "sum",
        *(outputs or (None,) * 4),
        *(workspace, extension.tickets(logprob.device, 1 + tiles), MAX_BLOCKS, part, whole),
    )
    if status == extension.BAD_OFFSETS:
        _check_order(inputs)  # finds the same error and raises


def _fallback(
    inputs: _Inputs, settings: _Settings, sum_p_sq: Tensor | None, with_bias: bool, whole: Tensor | None
) -> ClippedSurrogate:
    """Compute the outputs with the torch fallback, from the reference implementation in algorithm/."""
    _check_order(inputs)
    logprob, old_logprob, advantage, _, offsets = inputs
    weight_T = inputs.weight_T
    result = surrogate(logprob, old_logprob, advantage, weight_T, offsets, whole=whole, **settings._asdict())
    live = weight_T != 0
    tokens, clipped = live.sum().double(), result.clipped_T.sum().double()

    def mean(value_T: Tensor) -> Tensor:
        return value_T.double().masked_fill(~live, 0).sum() / tokens.clamp(min=1)

    def in_logits(coefficient_T: Tensor) -> Tensor:
        if sum_p_sq is None:
            return tokens.new_zeros(())
        return squared_estimate("logit", coefficient_T, logprob, sum_p_sq)

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
        in_logits(result.bias_T),
        in_logits(result.gradient_T),
        result.gradient_T,
    )
    bias_T = result.bias_T.float() if with_bias else None
    return ClippedSurrogate._make((*(tensor.float() for tensor in parts), bias_T))


def _check_order(inputs: _Inputs) -> None:
    if inputs.offsets is not None:
        check_offsets("segment_offsets", inputs.offsets, len(inputs.logprob))


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low={clip_low} bounds the ratio at 1-clip_low; choose a number in [0, 1]")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high} bounds the ratio at 1+clip_high; choose a number >= 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} bounds the ratio where A < 0; choose a number > 1 or None")
