"""Log-probability, entropy and sum of squared probabilities from shards of the logits.

Per row of one shard, with x = logit / temperature:
    m = max x,  e = exp(x - m),  s = sum e,  u = sum (x - m) e,  q = sum e^2,  and x_y if the target is here
Ranks exchange only the five numbers m, s, u, q and x_y per row. Merged over shards:
    logprob = x_y - m - ln s,   entropy = ln s - u/s,   sum p^2 = q/s^2
and |d logprob / d x|^2 = 1 - 2 p_y + sum p^2, which the clipping correction uses.
m is subtracted before anything is summed, and m + ln s is never computed: for logits near 1e4 that float32
number would lose the third decimal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are processed in chunks of about this many logits, so that the float32 copies stay small compared with
# the logits.
CHUNK = 1 << 24

MAX, SUM, MOMENT, SQUARES, TARGET = range(5)


@dataclass(frozen=True)
class Merged:
    """Outputs for whole rows, float32 [T] unless noted. All are NaN for a row without a finite logit."""

    logprob_T: Tensor
    entropy_T: Tensor
    sum_p_sq_T: Tensor
    max_T: Tensor
    log_sum_T: Tensor  # ln s
    missing_T: Tensor  # bool: no shard holds the target


def shard_statistics(
    logits: Tensor, target_T: Tensor, temperature_T: Tensor, vocab_start: int, valid: int
) -> Tensor:
    """Return max, sum, moment, squares and target logit of the shard's first `valid` columns, float32 [5, T].

    logits: [T, V] in any float dtype. target_T: global ids; column i of this shard is id vocab_start + i.
    The target logit is NaN if the target is not among these columns. A row whose logits are all -inf gives
    (-inf, 0, 0, 0) and its target logit.
    """
    out = torch.zeros(5, len(logits), dtype=torch.float32, device=logits.device)
    out[MAX], out[TARGET] = -torch.inf, torch.nan
    if valid == 0:
        return out
    column_T, owned_T = local_column(target_T, vocab_start, valid)
    for rows in chunks(logits):
        x = logits[rows, :valid].float() / temperature_T[rows, None]
        top = x.amax(1)
        at_target = x.gather(1, column_T[rows, None]).squeeze(1)
        x -= top.masked_fill(top == -torch.inf, 0)[:, None]
        e = x.exp()
        out[MAX, rows], out[SUM, rows] = top, e.sum(1)
        # e is 0 where x is -inf, and 0 * -inf would be NaN
        out[MOMENT, rows] = x.clamp_(min=torch.finfo(torch.float32).min).mul_(e).sum(1)
        out[SQUARES, rows] = e.square_().sum(1)
        out[TARGET, rows] = at_target.masked_fill(~owned_T[rows], torch.nan)
    return out


def merge(statistics: Tensor) -> Merged:
    """Return the outputs from the statistics [W, 5, T] of W shards.

    Sums run in float64 in the order of the shards, so all ranks that hold the same statistics return the same
    result. A NaN or +inf logit makes its row NaN.
    """
    max_W, sum_W, moment_W, squares_W, target_W = statistics.double().unbind(1)  # [W, T] each
    top = max_W.amax(0)
    shift_W = (max_W - top).masked_fill(max_W == -torch.inf, 0)  # a shard of -inf adds sums of 0 at any shift
    scale_W = shift_W.exp()
    total = (sum_W * scale_W).sum(0)
    shifted_W = moment_W + shift_W * sum_W
    moment = (shifted_W * scale_W).sum(0)
    squares = (squares_W * scale_W.square()).sum(0)
    absent_W = target_W.isnan()
    at_target = target_W.masked_fill(absent_W, 0).sum(0)
    log_sum = total.log()
    return Merged(
        logprob_T=(at_target - top - log_sum).float(),
        entropy_T=(log_sum - moment / total).float(),
        sum_p_sq_T=(squares / total.square()).float(),
        max_T=top.float(),
        log_sum_T=log_sum.float(),
        # A NaN target logit looks like an absent target. It also makes the row's sum NaN, which tells the two
        # cases apart: a NaN logit is an error of the model, not of the target.
        missing_T=absent_W.all(0) & ~total.isnan(),
    )


def logits_gradient(
    logits: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    vocab_start: int,
    valid: int,
    merged: Merged,
    ignored_T: Tensor,
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Return the shard's gradient [T, V], in the logits' dtype.

    cotangents: g, h, c of logprob, entropy H and Q = sum p^2, [T] each; None counts as 0.
    d/dx_i = g (1[i=y] - p_i) - h p_i (ln p_i + H) + 2 c p_i (p_i - Q), where x = logit / temperature.
    p is recomputed in float32. 1 - p_y is computed as -expm1(logprob), which is accurate where p_y is close
    to 1. The gradient is 0 for ignored rows and for columns from `valid` on, even if their logits are NaN.
    """
    g_T, h_T, c_T = cotangents
    out = torch.zeros_like(logits)
    if valid == 0:
        return out
    column_T, owned_T = local_column(target_T, vocab_start, valid)
    for rows in chunks(logits):
        log_p = logits[rows, :valid].float() / temperature_T[rows, None]
        log_p -= merged.max_T[rows, None]
        log_p -= merged.log_sum_T[rows, None]
        p = log_p.exp()
        factor = torch.zeros_like(p)
        if h_T is not None:
            log_p.clamp_(min=-1e30)  # p is 0 there, and 0 * -inf would be NaN
            factor -= h_T[rows, None] * (log_p + merged.entropy_T[rows, None])
        if c_T is not None:
            factor += 2 * c_T[rows, None] * (p - merged.sum_p_sq_T[rows, None])
        gradient = p * factor
        if g_T is not None:
            at_target = gradient.gather(1, column_T[rows, None]).squeeze(1)
            gradient -= g_T[rows, None] * p
            at_target = at_target - g_T[rows] * torch.expm1(merged.logprob_T[rows])
            where_owned = owned_T[rows].nonzero()[:, 0]
            gradient[where_owned, column_T[rows][where_owned]] = at_target[where_owned]
        gradient /= temperature_T[rows, None]
        out[rows, :valid] = gradient.masked_fill_(ignored_T[rows, None], 0)
    return out


def local_column(target_T: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Return the target's column in this shard (0 if it is in another one) and whether it is in this one."""
    column_T = target_T - vocab_start
    owned_T = (column_T >= 0) & (column_T < valid)
    return column_T.masked_fill(~owned_T, 0), owned_T


def chunks(logits: Tensor) -> list[slice]:
    """Return slices of rows that hold about CHUNK logits each."""
    step = max(1, CHUNK // max(1, logits.shape[1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
