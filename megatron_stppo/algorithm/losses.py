"""Losses by name (`algorithm.loss`) that the clipped surrogate cannot express: their ratio is a constant.

All return the loss of each token, [T], and take log-probs and advantages [T], the offsets of the segments
(None: every token is one), and the bounds of the ratio, of which `high` is at least 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import MAX_LOG_RATIO, segment_ratio, spread


def cispo(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    offsets: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """Return -clip(r, low, high) A log pi, where r = pi / pi_old is a constant.

    A token whose ratio is limited keeps its gradient. Source: MiniMax-M1, arXiv 2506.13585, equation 4.

    Example: r = 6, high = 5, A = 2: the gradient of the log-prob is -10.
    """
    delta_T = (logprob_T.detach() - old_logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return -delta_T.exp().clamp(low, high) * advantage_T * logprob_T


def gspo_token(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    offsets: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """Return -min(s A, clip(s, low, high) A) with s = sg(w) pi / sg(pi), for the ratio w of the segment.

    So every token has the ratio of its segment and the gradient of its own advantage. The surrogate instead
    has the derivative of w: the same if advantages are equal inside each segment. Source: GSPO, arXiv
    2507.18071, section 4.3.

    Example: a segment with w = 1 and advantages 1 and 3 has the gradients -1 and -3; the surrogate -2 and -2.
    """
    ratio_S, _ = segment_ratio(logprob_T.detach(), old_logprob_T, offsets)
    ratio_T = spread(ratio_S, offsets, len(logprob_T)) * (logprob_T - logprob_T.detach()).exp()
    return -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)


def topr(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    offsets: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """Return -A log pi where A > 0, and -clip(w, low, high) A log pi elsewhere; w is a constant.

    Source: TOPR, arXiv 2503.14286, with low = 0 and high = 1, for whole sequences; IPA, arXiv 2512.24873,
    equation 9, for the tokens between two interactions. Both take the sign of the reward in place of A's.

    Example: low 0, high 1, a segment with w = 2 and A = -1: gradients of 1; with w = 1/2, of 1/2.
    """
    ratio_S, _ = segment_ratio(logprob_T.detach(), old_logprob_T, offsets)
    ratio_T = spread(ratio_S.clamp(low, high), offsets, len(logprob_T))
    return -ratio_T.masked_fill(advantage_T > 0, 1) * advantage_T * logprob_T


LOSSES: dict[str, Callable[..., Tensor]] = {"cispo": cispo, "gspo_token": gspo_token, "topr": topr}
