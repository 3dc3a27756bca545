"""The surrogate as the paper defines it: a Python loop in float64, with derivatives by autograd."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def objective(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    offsets: list[int],
    low: float = 0.2,
    high: float = 0.2,
    dual_clip: float | None = None,
    pooling: str = "mean",
    power: float = 0.0,
) -> Tensor:
    """Return sum_s sum_{t in s} c_t min(w A, clip(w) A), for A < 0 bounded below by dual * A.

    Bounds of n tokens: (1 - low), (1 + high) and dual = dual_clip, to the power of n^-power.
    """
    total = logprob.sum() * 0
    for start, end in pairwise(offsets):
        if start == end:
            continue
        delta = logprob[start:end] - old_logprob[start:end]
        narrow = 1 / (end - start) ** power
        ratio = (delta.mean() if pooling == "mean" else delta.sum()).exp()
        for t in range(start, end):
            a = advantage[t]
            term = torch.minimum(ratio * a, ratio.clamp((1 - low) ** narrow, (1 + high) ** narrow) * a)
            if dual_clip is not None and a < 0:
                term = torch.maximum(term, dual_clip**narrow * a)
            total = total + weight[t] * term
    return total
