"""Losses by name (`algorithm.loss`) that the clipped surrogate cannot express: their ratio is a constant.

All return the loss of each token, [T], and take log-probs and advantages [T], the offsets of the segments
(None: every token is one), and the bounds of the ratio, of which `high` is at least 1.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_stppo.algorithm.ratio import MAX_LOG_RATIO


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


LOSSES: dict[str, Callable[..., Tensor]] = {"cispo": cispo}
