"""The section of benchmark_kernels about the surrogate: ST-PPO's beside token-level PPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.ratio import segment_ratio, spread
from tools.kernels.measure import Bench, Row, Variant, implementation

CLIP = 0.2
# Turn lengths. The number of turns per trajectory does not matter: at turn level a segment is a turn.
TURN_SETS: dict[str, Callable[[int], Tensor]] = {
    "lognormal, median 150": lambda n: torch.empty(n).log_normal_(5.0106, 0.8),
    "fixed 256": lambda n: torch.full((n,), 256.0),
    "search agent, 40-150": lambda n: torch.empty(n).uniform_(40, 151),
    "SWE agent, 60-400": lambda n: torch.empty(n).uniform_(60, 401),
    "single turns, 8-32K": lambda n: torch.empty(n).uniform_(8192, 32769),
    "turns of 131,072": lambda n: torch.full((n,), 131072.0),
    "turns of one": lambda n: torch.ones(n),
    "30 % empty": lambda n: torch.empty(n).log_normal_(5.0106, 0.8) * (torch.rand(n) > 0.3),
}


def surrogate_rows(
    bench: Bench, tokens: int, sets: Sequence[str], missing: str, cold: bool
) -> Iterator[list[Row]]:
    """Compare fused ST-PPO with token-level PPO, forward and backward, over turn lengths.

    missing: the reason why torch.compile is not measured, or empty.
    """
    for name in sets:
        yield surrogate_group(bench, tokens, name, missing, cold)


def surrogate_group(bench: Bench, tokens: int, turns: str, missing: str, cold: bool) -> list[Row]:
    """Return the rows of one set of turn lengths."""
    offsets = turn_offsets(turns, tokens).to(bench.device)
    logprob, old, advantage = (x.to(bench.device) for x in surrogate_inputs(offsets.cpu(), tokens))
    logprob.requires_grad_()
    mask, weight = torch.ones_like(old), torch.full_like(old, 1 / tokens)
    by_token, by_turn = (exact_ppo(logprob, old, advantage, cut) for cut in (None, offsets))
    by_length, by_size = exact_ppo(logprob, old, advantage, offsets, power=1.0), {"clip_length_power": 1.0}
    moved = 24 * tokens + 12 * (len(offsets) - 1)  # per token 12 read, 4 written; backward 4 and 4

    def ours(name: str, mode: str, reference: list[Tensor], **given: Any) -> Variant:
        def run(_: None) -> Sequence[Tensor]:
            with implementation(mode):
                objective = ops.clipped_surrogate(
                    logprob, old, advantage, clip_low=CLIP, clip_high=CLIP, **given
                ).objective
                return objective, *torch.autograd.grad(objective, logprob)

        return Variant(name, run, reference=[-x for x in reference], ours=True)

    def theirs(name: str, function: Callable[..., tuple[Tensor, ...]], missing: str = "") -> Variant:
        def run(_: None) -> Sequence[Tensor]:
            loss = function(logprob, old, advantage, mask)[0]
            return loss, *torch.autograd.grad(loss, logprob)

        return Variant(name, run, reference=by_token, missing=missing)

    variants = [
        ours("fused ST-PPO", "extension", by_turn, segment_offsets=offsets),
        ours("fused ST-PPO, weight per token", "extension", by_turn, segment_offsets=offsets, weight=weight),
        ours("fused ST-PPO, bounds by length", "extension", by_length, segment_offsets=offsets, **by_size),
        ours("fused token-level PPO", "extension", by_token),
        ours("fallback of ST-PPO", "torch", by_turn, segment_offsets=offsets),
        theirs("token-level PPO, eager", token_ppo),
        theirs("token-level PPO, bare", bare_ppo),
        theirs("token-level PPO, torch.compile", torch.compile(token_ppo, dynamic=False), missing),
        theirs("bare, torch.compile", torch.compile(bare_ppo, dynamic=False), missing),
    ]
    return bench.rows("clipped_surrogate", turns, tokens, moved, variants, cold)


def turn_offsets(turns: str, tokens: int) -> Tensor:
    """Return int64 [S+1]: turns of the set, up to `tokens` tokens in total. The last turn is cut."""
    lengths = TURN_SETS[turns](tokens + 64).long().clamp(max=tokens)
    ends = lengths.cumsum(0)
    count = int((ends < tokens).sum()) + 1
    return torch.cat([ends.new_zeros(1), ends[:count].clamp(max=tokens)])


def surrogate_inputs(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprob, old_logprob, advantage) [T].

    At token and at turn level, some ratios are beyond a bound of the clip, and none is on it.
    """
    logprob, advantage = -3 * torch.rand(tokens), torch.randn(tokens)
    old = logprob + 0.1 * torch.randn(tokens) + spread(0.15 * torch.randn(len(offsets) - 1), offsets, tokens)
    for _ in range(3):  # float64 and float32 must agree on what is clipped
        for given, power in ((offsets, 0), (offsets, 1), (None, 0)):
            ratio_T = spread(segment_ratio(logprob, old, given)[0], given, tokens)
            length_T = spread(offsets.diff(), offsets, tokens).double() ** power
            near_T = ((ratio_T**length_T - 1).abs() - CLIP).abs() < 1e-4
            old += 1e-3 * near_T
    return logprob, old, advantage


def token_ppo(logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> tuple[Tensor, ...]:
    """Return (loss, clip fraction, k1, k3) of token-level PPO, as trainers compute it in every step.

    Two simplifications favour them: there is no padding and no observation token, and autograd does not
    record the monitors.
    """
    delta_T = (logprob_T - old_T).clamp(-20, 20)
    ratio_T = delta_T.exp()
    plain_T, clipped_T = -advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - CLIP, 1 + CLIP)
    loss = masked_mean(torch.maximum(plain_T, clipped_T), mask_T)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped_T > plain_T).float(), mask_T)
        k1 = masked_mean(-delta_T, mask_T)
        k3 = masked_mean(delta_T.expm1() - delta_T, mask_T)
    return loss, clip_fraction, k1, k3


def bare_ppo(logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> tuple[Tensor, ...]:
    """Return the loss of minimal token-level PPO: no mask, no monitors, no guard against overflow."""
    ratio_T = (logprob_T - old_T).exp()
    kept_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage_T)
    return (-kept_T.mean(),)


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Tensor:
    return (value_T * mask_T).sum() / mask_T.sum()


def exact_ppo(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, offsets: Tensor | None, power: float = 0.0
) -> list[Tensor]:
    """Return [loss, d loss / d logprob] in float64. With `offsets`, a turn's ratio is its geometric mean, and
    (1 -+ CLIP)^(n^-power) are the bounds of a turn of n tokens."""
    x = logprob_T.detach().double().requires_grad_()
    delta_T, share_T = x - old_T.double(), torch.ones_like(x.detach())
    if offsets is not None:
        length_S = offsets.diff()
        segment_T = torch.arange(len(length_S), device=x.device).repeat_interleave(length_S)
        sum_S = torch.zeros(len(length_S), dtype=x.dtype, device=x.device).index_add(0, segment_T, delta_T)
        delta_T = (sum_S / length_S.clamp(min=1))[segment_T]
        share_T = length_S.double()[segment_T] ** -power
    ratio_T, advantage_T = delta_T.exp(), advantage_T.double()
    bounded_T = ratio_T.clamp((1 - CLIP) ** share_T, (1 + CLIP) ** share_T)
    loss = -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T).mean()
    return [loss.detach(), *torch.autograd.grad(loss, x)]
