"""The importance ratio of a segment, and sums over segments.

Source: ST-PPO, arXiv 2511.20718. A segment is a token (PPO), a turn (Turn-PPO, ST-PPO) or a trajectory
(GSPO). The same functions compute all three; only the segment offsets differ. With `offsets=None` every token
is a segment.
"""

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "turn", "sequence"]
Pooling = Literal["mean", "sum"]

# exp(20) = 4.9e8 is far beyond every clip bound, and its square still fits in float32.
MAX_LOG_RATIO = 20.0


def segment_offsets(level: Level, turn_offsets: Tensor, action_offsets: Tensor) -> Tensor | None:
    """Return the offsets into T of the segments that share a ratio; None at token level.

    turn_offsets [S+1] and action_offsets [N+1] are those of a Batch or Microbatch. Raises ValueError for an
    unknown level.
    """
    if level == "token":
        return None
    if level == "turn":
        return turn_offsets
    if level == "sequence":
        return action_offsets
    raise ValueError(f"segments={level!r} is not known; choose token, turn or sequence")


def check_offsets(name: str, offsets: Tensor, total: int) -> None:
    """Raise ValueError unless offsets [S+1] start at 0, never decrease and end at `total`.

    Reads one flag back to the host.
    """
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(f"{name} has shape {list(offsets.shape)}; give [S+1], which is [0] for no segments")
    good = (offsets[0] == 0) & (offsets[-1] == total) & (offsets.diff() >= 0).all()
    if not bool(good):
        shown = f"{offsets[:8].tolist()}{'...' if len(offsets) > 8 else ''}"
        raise ValueError(f"{name}={shown} must start at 0, never decrease and end at {total}")


def segment_sum(value_T: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the sum of each segment, [S], added in the order of the tokens; 0 for an empty segment."""
    if offsets is None:
        return value_T
    return torch.segment_reduce(value_T, "sum", offsets=offsets, initial=0.0)


def spread(value_S: Tensor, offsets: Tensor | None, total: int) -> Tensor:
    """Return the value of each token's segment, [T]."""
    if offsets is None:
        return value_S
    return value_S.repeat_interleave(offsets.diff(), output_size=total)


def episode_offsets(offsets: Tensor, first_N: Tensor | None) -> Tensor:
    """Return the offsets of the episodes, from those of the trajectories.

    first_N: bool [N], the trajectories that begin an episode; None: all. The others of an episode follow it.
    """
    return offsets if first_N is None else torch.cat([offsets[:-1][first_N], offsets[-1:]])


def segment_ratio(
    logprob_T: Tensor, old_logprob_T: Tensor, offsets: Tensor | None, pooling: Pooling = "mean"
) -> tuple[Tensor, Tensor]:
    """Return the ratio w [S] and the divisor d [S] of its derivative dw/dlogprob_u = w/d.

    With delta = logprob - old_logprob and n tokens in the segment
        mean: w = exp(sum delta / n), d = n    (geometric mean of the token ratios)
        sum:  w = exp(sum delta),     d = 1    (their product)
    The exponent is clamped to [-20, 20]. An empty segment has w = 1. w is computed in float64 and then
    rounded to the inputs' dtype. A ratio that equals a clip bound in that dtype is therefore not clipped
    because of a rounding error.
    """
    ratio_S, divisor_S = ratio_of(*segment_deltas(logprob_T, old_logprob_T, offsets), pooling)
    return ratio_S.to(logprob_T.dtype), divisor_S


def segment_deltas(logprob_T: Tensor, old_logprob_T: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of log ratios and the number of tokens of each segment, float64 [S]."""
    delta_S = segment_sum(logprob_T.double() - old_logprob_T.double(), offsets)
    return delta_S, segment_count(offsets, delta_S)


def segment_count(offsets: Tensor | None, like_S: Tensor) -> Tensor:
    """Return the number of tokens of each segment, float64 [S]."""
    return torch.ones_like(like_S).double() if offsets is None else offsets.diff().double()


def ratio_of(delta_S: Tensor, count_S: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Return what segment_ratio returns, not rounded, from what segment_deltas returns.

    Raises ValueError for an unknown pooling.
    """
    if pooling not in ("mean", "sum"):
        raise ValueError(f"pooling={pooling!r} is not known; choose mean or sum")
    divisor_S = count_S.clamp(min=1) if pooling == "mean" else torch.ones_like(count_S)
    exponent_S = (delta_S / divisor_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return exponent_S.exp(), divisor_S
