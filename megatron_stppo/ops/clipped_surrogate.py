"""The clipped surrogate as a differentiable op.

The forward computes objective and gradient in one pass; the backward is one product.
"""

import math
from collections.abc import Sequence
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
from megatron_stppo.ops.extension import check, has_data, is_one

INTEGERS = (torch.int32, torch.int64)
TOTALS, SEGMENT_SUMS = 10, 4  # SURROGATE_TOTALS and SEGMENT_SUMS of csrc/ops.h
MAX_BLOCKS = 2**31 - 1  # blocks of a GPU kernel; only tests change it, and results do not depend on it
# clip_low, clip_high, dual_clip, clip_length_power, pooling
Bounds = tuple[float, float, float | None, float, Pooling]


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
    clip_length_power: float = 0.0,
    weight: float | Tensor | None = None,
    pooling: Pooling = "mean",
    sum_p_sq: Tensor | None = None,
    with_bias: bool = False,
    group: dist.ProcessGroup | None = None,
) -> ClippedSurrogate:
    """Return J = sum_t c_t min(w A_t, clip(w, low, high) A_t) and statistics of the clipping.

    w is the ratio of the segment of token t, low = (1 - clip_low)^(n^-p) and high = (1 + clip_high)^(n^-p).
    n is the number of the segment's tokens, on all ranks of `group`, and p is clip_length_power.
    Definitions, NaN handling and the derivative are in megatron_stppo/algorithm/surrogate.py.

    logprob, old_logprob, advantage: float32 [T].
    segment_offsets: int32 or int64 [S+1], from 0 to T, non-decreasing. None: every token is a segment.
    clip_low: in [0, 1]. clip_high: at least 0. dual_clip: above 1; dual_clip^(n^-p) is an upper bound of w
    where A < 0; None: no bound. clip_length_power: at least 0; 0: the same bounds for every length.
    weight: c, a number, float32 [T], or None for 1/T.
    pooling: "mean": w is the geometric mean of the segment's token ratios; "sum": their product.
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
    assert 0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1)
    assert 0 <= clip_length_power < math.inf
    with torch.no_grad():
        if not isinstance(weight, Tensor) and weight == 0:
            weight = torch.zeros_like(logprob)  # a tensor makes the kernels mask NaN
        bounds = (clip_low, clip_high, dual_clip, clip_length_power, pooling)
        given = Given(logprob, old_logprob, advantage, weight, segment_offsets, bounds, sum_p_sq)
        whole = None
        if group is not None and segment_offsets is not None and dist.get_world_size(group) > 1:
            whole = summed(given)
            dist.all_reduce(whole, group=group)
        totals, ratio, gradient_T, bias_T = computed(given, with_bias, whole)
        total_objective, *statistics = totals.unbind()
    objective: Tensor = _WithGradient.apply(  # type: ignore[no-untyped-call]
        logprob, total_objective, gradient_T
    )
    return ClippedSurrogate._make((objective, ratio, *statistics, gradient_T, bias_T))


class Given(NamedTuple):
    """What a computation of the surrogate reads: the arguments of `clipped_surrogate`."""

    logprob: Tensor
    old_logprob: Tensor
    advantage: Tensor
    weight: float | Tensor
    offsets: Tensor | None
    bounds: Bounds = (0.0, 0.0, None, 0.0, "mean")  # not read for sums of segments
    sum_p_sq: Tensor | None = None

    @property
    def weight_T(self) -> Tensor:
        weight = self.weight
        return weight if isinstance(weight, Tensor) else torch.full_like(self.logprob, weight)

    @property
    def segments(self) -> int:
        return len(self.logprob) if self.offsets is None else max(0, len(self.offsets) - 1)


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
        return gradient_T if is_one(cotangent) else cotangent * gradient_T, None, None


def summed(given: Given) -> Tensor:
    """Return segment_sums of algorithm/surrogate.py for this rank's tokens, float64 [S, 4]."""
    logprob, offsets = given.logprob, given.offsets
    assert offsets is not None
    if not extension.applies(logprob):
        check_offsets("segment_offsets", offsets, len(logprob))
        return segment_sums(logprob, given.old_logprob, given.advantage, given.weight_T, offsets)
    part = torch.empty((given.segments, SEGMENT_SUMS), dtype=torch.float64, device=logprob.device)
    if len(part):  # an empty tensor is a null pointer, which selects the full computation
        _run(given, part=part)
    return part


def computed(
    given: Given, with_bias: bool, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (totals, ratio [S], gradient_T, bias_T or None), float32.

    totals: the 0-d fields of ClippedSurrogate, in its order. whole: segment sums of all ranks, if segments
    are split over ranks.
    """
    logprob = given.logprob
    if not extension.applies(logprob):
        return _fallback(given, with_bias, whole)
    ratio, gradient_T = logprob.new_empty(given.segments), torch.empty_like(logprob)
    bias_T = torch.empty_like(logprob) if with_bias else None
    totals = logprob.new_empty(TOTALS)
    _run(given, (ratio, gradient_T, bias_T, totals), whole=whole)
    return totals, ratio, gradient_T, bias_T


def _run(
    given: Given,
    outputs: Sequence[Tensor | None] = (None,) * 4,
    part: Tensor | None = None,
    whole: Tensor | None = None,
) -> None:
    """Call csrc/clipped_surrogate_cpu.cpp or csrc/clipped_surrogate.cu.

    outputs: ratio, gradient, bias and totals to be written; None if `part` is given. part: written with this
    rank's segment sums. whole: segment sums of all ranks.
    """
    logprob, old_logprob, advantage, weight, offsets, bounds, sum_p_sq = given
    if not has_data(logprob):
        return
    total, segments = len(logprob), len(logprob) if offsets is None else len(offsets) - 1
    if offsets is not None and segments < 0:
        check_offsets("segment_offsets", offsets, total)  # raises: the offsets are empty
    tiles = extension.surrogate_tiles(total + (0 if offsets is None else segments))
    workspace = torch.empty(tiles * extension.SURROGATE_ROW, dtype=torch.float64, device=logprob.device)
    clip_low, clip_high, dual_clip, length_power, pooling = bounds
    per_token, uniform = (weight, 0.0) if isinstance(weight, Tensor) else (None, float(weight))
    status = extension.run(
        "clipped_surrogate",
        logprob.device,
        *(logprob, old_logprob, advantage, per_token, sum_p_sq, None if offsets is None else offsets.long()),
        *(total, segments, uniform, 1 - clip_low, 1 + clip_high),
        *(math.inf if dual_clip is None else dual_clip, length_power),
        pooling == "sum",
        *outputs,
        *(workspace, extension.tickets(logprob.device, 2 + 2 * tiles), MAX_BLOCKS, part, whole),
    )
    if status == extension.BAD_OFFSETS and offsets is not None:
        check_offsets("segment_offsets", offsets, total)  # finds the same error and raises


def _fallback(
    given: Given, with_bias: bool, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the outputs with the torch fallback, from the reference implementation in algorithm/."""
    logprob, old_logprob, advantage, _, offsets, bounds, sum_p_sq = given
    weight_T = given.weight_T
    if offsets is not None:
        check_offsets("segment_offsets", offsets, len(logprob))
    clip_low, clip_high, dual_clip, length_power, pooling = bounds
    result = surrogate(
        *(logprob, old_logprob, advantage, weight_T, offsets),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        clip_length_power=length_power,
        pooling=pooling,
        whole=whole,
    )
    live = weight_T != 0
    tokens, clipped = live.sum().double(), result.clipped_T.sum().double()

    def mean(value_T: Tensor) -> Tensor:
        return value_T.double().masked_fill(~live, 0).sum() / tokens.clamp(min=1)

    def in_logits(coefficient_T: Tensor) -> Tensor:
        if sum_p_sq is None:
            return tokens.new_zeros(())
        return squared_estimate("logit", coefficient_T, logprob, sum_p_sq)

    totals = (
        result.objective,
        clipped / tokens.clamp(min=1),
        result.bias_T.square().sum(),
        result.gradient_T.square().sum(),
        mean(penalties.k1(old_logprob, logprob)),
        mean(penalties.k3(old_logprob, logprob)),
        clipped,
        tokens,
        in_logits(result.bias_T),
        in_logits(result.gradient_T),
    )
    gradient_T, bias_T = result.gradient_T.float(), result.bias_T.float() if with_bias else None
    return torch.stack([x.float() for x in totals]), result.ratio_S.float(), gradient_T, bias_T
