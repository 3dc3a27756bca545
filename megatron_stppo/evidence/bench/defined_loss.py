"""Losses and presets as docs/algorithms.md and its sources define them: in float64, and without imports from
the code that trains. `verify` and the tests compare the trainer with them.

It writes down what a step maximises, and leaves the derivatives to autograd. A row of PRESETS has what
differs from DEFAULTS. Fields that DEFAULTS lacks are null.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.config import AlgorithmConfig

OwnLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Objective = tuple[Tensor, Tensor, Tensor]  # J, what clipping removes from it, the clipped tokens: bool [T]


@dataclass(frozen=True)
class Sample:
    """The action tokens of a batch: float64 [T], and the slices of each turn, history and episode.

    counted: bool [T], tokens of live episodes of the minibatch.
    """

    logprob: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor  # log-probs of the policy, the old one, the reference, the engine
    advantage: Tensor
    entropy: Tensor
    square: Tensor  # sum_v p_v^2
    counted: Tensor
    turns: Sequence[slice]
    histories: Sequence[slice]
    episodes: Sequence[slice]

    def segments(self, level: str) -> Sequence[slice]:
        """Return the segments that `token`, `turn` or `sequence` names."""
        tokens = [slice(t, t + 1) for t in range(len(self.logprob))]
        return {"token": tokens, "turn": self.turns, "sequence": self.histories}[level]


@dataclass(frozen=True)
class ExactStep:
    """What a step computes. Numbers are of the minibatch; tensors of its tokens, [T]."""

    weight: Tensor  # c_t times the factor of algorithm.mismatch
    slope: Tensor  # of the loss, by each log-prob
    slope_entropy: Tensor
    removed: Tensor  # b
    numbers: dict[str, float]  # by the names of docs/metrics.md
    norms: dict[str, tuple[float, float]]  # estimates of C and of grad J


def pooled(delta: Tensor, pooling: str) -> Tensor:
    """Return the ratio of a segment. Outside of exp(-20) and exp(20) it is constant, but its slope is not."""
    exponent = delta.mean() if pooling == "mean" else delta.sum()
    return (exponent + (exponent.clamp(-20, 20) - exponent).detach()).exp()


def mismatch(s: Sample, a: AlgorithmConfig) -> Tensor:
    """Return the factor on c_t: of m = exp(mean of (log pi_old - log pi_engine))."""
    factor = torch.ones_like(s.old)
    for segment in s.segments(a.mismatch_level) if a.mismatch != "off" else ():
        m = float(pooled((s.old - s.engine)[segment], a.mismatch_pooling))
        lower = 1 / a.mismatch_bound if a.mismatch_lower is None else a.mismatch_lower
        kept = m if lower <= m <= a.mismatch_bound else 0.0
        factor[segment] = min(m, a.mismatch_bound) if a.mismatch == "truncate" else kept
    return factor


def weights(s: Sample, a: AlgorithmConfig) -> Tensor:
    """Return c_t, times the factor for the engine's mismatch, whose masked tokens c_t does not count."""
    factor = mismatch(s, a)
    counted, c = s.counted & (factor != 0), torch.zeros_like(s.old)
    of_kind = {"token_mean": [slice(0, len(c))], "turn_mean": s.turns, "episode_mean": s.episodes}
    parts = [part for part in of_kind.get(a.aggregation, s.histories) if counted[part].any()]
    fixed = {"sequence_mean_token_sum": 1, "sequence_mean_token_sum_norm": a.aggregation_length}
    for part in parts:
        divisor = fixed.get(a.aggregation) or int(counted[part].sum())
        c[part] = counted[part].double() / (len(parts) * divisor)
    return torch.where(counted, c * factor, 0.0)


def deciding(s: Sample, a: AlgorithmConfig, c: Tensor) -> Tensor:
    """Return A_t; with clip_decision=segment, its mean over the segment, weighted by c."""
    live, advantage = c != 0, torch.where(c != 0, s.advantage, 0.0)
    for part in s.segments(a.segments) if a.clip_decision == "segment" else ():
        if live[part].any():
            mean = (c * advantage)[part].sum() / c[part].sum()
            advantage[part] = torch.where(live[part], mean, 0.0)
    return advantage


def selected(s: Sample, a: AlgorithmConfig, advantage: Tensor) -> Tensor:
    """Return the tokens that algorithm.select leaves in J, bool [T]."""
    stays = torch.ones_like(s.counted)
    for part in s.segments(a.segments) if a.select == "ratio" else ():
        k = (part.stop - part.start) ** -a.clip_length_power
        w = float(pooled((s.logprob - s.old)[part], a.pooling))
        stays[part] = (1 - a.clip_low) ** k < w < (1 + a.clip_high) ** k
    if a.select == "probability":
        rise = s.logprob.exp() - s.old.exp()
        stays = torch.where(advantage > 0, rise <= a.select_bound, rise >= -a.select_bound)
    return stays


def clipped(
    logprob: Tensor,
    old: Tensor,
    advantage: Tensor,
    c: Tensor,
    segments: Sequence[slice],
    bounds: tuple[float, float] = (0.8, 1.2),
    dual: float = math.inf,
    power: float = 0.0,
    pooling: str = "mean",
) -> Objective:
    """Return J = sum c min(w A, clip(w) A), if A < 0 at least dual A; all bounds to the power of n^-power."""
    total = removed = logprob.sum() * 0
    out = torch.zeros(len(logprob), dtype=torch.bool)
    for part in segments:
        A, live = advantage[part], c[part] != 0
        if not live.any():
            continue
        w, k = pooled((logprob - old)[part], pooling), (part.stop - part.start) ** -power
        low, high = (bound**k for bound in bounds)
        term = torch.minimum(w * A, w.clamp(low, high) * A)
        term = torch.where(A < 0, torch.maximum(term, dual**k * A), term)
        total = total + (c[part] * term)[live].sum()
        outside = live & (((A > 0) & (w > high)) | ((A < 0) & (w < low)))
        removed, out[part] = removed + (c[part] * w * A)[outside].sum(), outside
    return total, removed, out


def objective(
    s: Sample, a: AlgorithmConfig, logprob: Tensor, advantage: Tensor, c: Tensor, own: OwnLoss | None
) -> Objective:
    """Return J without KL and entropy, of the configured loss. advantage: 0 for tokens that left J."""
    live, segments = c != 0, s.segments(a.segments)
    if own is None and a.loss is None:
        all_stay = a.select == "all"
        bounds = (1 - a.clip_low, 1 + a.clip_high) if all_stay else (0.0, math.inf)
        power = a.clip_length_power if all_stay else 0.0
        dual = a.dual_clip or math.inf
        return clipped(logprob, s.old, advantage, c, segments, bounds, dual, power, a.pooling)
    if own is not None:
        ends = torch.tensor([0, *(part.stop for part in segments)])
        old = torch.where(live, s.old, logprob.detach())
        of_token = -own(logprob, old, advantage, None if a.segments == "token" else ends)
    else:  # CISPO
        w = (logprob - s.old).detach().exp().clamp(1 - a.clip_low, 1 + a.clip_high)
        of_token = w * advantage * logprob
    return (c * of_token)[live].sum(), logprob.sum() * 0, torch.zeros_like(live)


KL: dict[str, Callable[[Tensor], Tensor]] = {  # of log pi - log ref
    "k1": lambda difference: difference,
    "k2": lambda difference: difference**2 / 2,
    "k3": lambda difference: (-difference).exp() - 1 + difference,
}


def step(s: Sample, a: AlgorithmConfig, own: OwnLoss | None = None) -> ExactStep:
    """Return what a step on these tokens computes, and its derivatives by autograd.

    own: algorithm.loss, if it names a function.
    """
    c = weights(s, a)
    live, deciding_T = c != 0, deciding(s, a, c)
    # also of tokens that the mismatch masks: they belong to the ratio of their segment
    logprob = torch.where(s.counted, s.logprob, 0.0).requires_grad_()
    entropy = torch.where(live, s.entropy, 0.0).requires_grad_()
    stays = selected(s, a, deciding_T)
    J, removed, out = objective(s, a, logprob, torch.where(stays, deciding_T, 0.0), c, own)
    in_loss = a.kl_coefficient if a.kl_in == "loss" else 0.0
    divergence = (c * KL[a.kl_estimator](logprob - s.reference))[live].sum() if in_loss else J * 0
    surprise = (c * entropy)[live].sum()
    loss = -J - a.entropy_coefficient * surprise + in_loss * divergence
    g, b = slope(J, logprob), slope(removed, logprob)
    tokens, total = max(1, int(live.sum())), float(c.sum()) or 1.0
    numbers = {
        "actor/objective": J.item(),
        "actor/entropy": surprise.item() / total,
        "actor/kl_loss": divergence.item() / total,
        "actor/kl_to_old": float(KL["k3"](s.old - s.logprob)[live].sum()) / tokens,
        "actor/clip_fraction": float(out.sum()) / tokens,
        "actor/selected": float(stays[live].sum()) / tokens if live.any() else 1.0,
    }
    return ExactStep(c, slope(loss, logprob), slope(loss, entropy), b, numbers, estimates(s, b, g))


def slope(value: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative by each number of `leaf`; 0 where there is none."""
    return torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0]


def estimates(s: Sample, b: Tensor, g: Tensor) -> dict[str, tuple[float, float]]:
    """Return what `coefficient` and `logit` estimate for ||C|| and ||grad J||."""
    of_space = {"coefficient": torch.ones_like(b), "logit": 1 - 2 * s.logprob.exp() + s.square}

    def size(x: Tensor, factor: Tensor) -> float:
        return float((x**2 * factor.clamp(min=0))[s.counted].sum()) ** 0.5

    return {name: (size(b, factor), size(g, factor)) for name, factor in of_space.items()}


def bias_norm(step: ExactStep, a: AlgorithmConfig, gradient: float, exact: float = 0.0) -> float:
    """Return ||C|| in its unit. gradient: norm of the loss's gradient. exact: that of C, in parameters."""
    size = exact
    if a.correction != "gradient":  # in parameter space, by the ratio of the two norms
        of_c, of_j = step.norms[a.correction]
        size = of_c / of_j * gradient if of_c < 1e6 * of_j else max(of_c, 1e6 * gradient)
        size = size if of_c else 0.0
    if a.correction_unit == "sum":
        total = float(step.weight.sum())
        return size * float((step.weight != 0).sum()) / total if total else 0.0
    return min(size / gradient, 1e6) if a.correction_unit == "relative" else size


def scale(norm: float, clipped: float, a: AlgorithmConfig) -> float:
    """Return 1 / max(floor, strength ||C||); 1 where nothing is clipped."""
    size = max(a.correction_floor, a.correction_strength * norm)
    return 1 / size if clipped and size and a.correction != "off" else 1.0


def rate(a: AlgorithmConfig, index: int, steps: int, last: float, to_old: float, after: float) -> float:
    """Return the factor of algorithm.rate on the learning rate of a step.

    index: of the step, of `steps` in its iteration. last: the factor before. to_old: `capped_kl` on its
    tokens. after: what the update before has done.
    """
    if a.rate == "open_loop" and a.rate_profile is not None:
        return a.rate_profile[index]
    if a.rate == "constant":
        return 1.0
    at_first = steps == 1 or a.old_policy == "behaviour"  # what each iteration measures once
    kl = (after if at_first else 0.0) if index == 0 else (0.0 if at_first else to_old)
    may_rise = a.rate_rise == "step" or index == (0 if at_first else steps - 1)
    if kl > 2 * a.rate_kl:
        last /= 1.5
    elif 0 < kl < a.rate_kl / 2 and may_rise:
        last *= 1.5
    return min(max(last, 0.01), 1.0)


def capped_kl(s: Sample, c: Tensor) -> float:
    """Return the mean of KL(old policy, policy) by k3, at most 1 nat per token, over the loss's tokens."""
    kl = KL["k3"](s.old - s.logprob)[c != 0]
    return float(kl.clamp(max=1).mean()) if len(kl) else 0.0


def value_error(value: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """Return 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2) of each token.

    Example: V=1, V_old=0, R=1, clip=0.5: the clipped value 0.5 is farther from R, so 0.125.
    """
    near = torch.minimum(torch.maximum(value, old - clip), old + clip)
    return torch.maximum((value - target) ** 2, (near - target) ** 2) / 2


Fields = dict[str, Any]
DEFAULTS: Fields = {  # of st_ppo
    "segments": "turn", "pooling": "mean", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0,
    "clip_length_power": 0.5, "clip_decision": "token", "aggregation": "token_mean",
    "correction": "logit", "correction_apply": "step", "correction_unit": "relative",
    "correction_strength": 10.0, "correction_floor": 1.0, "correction_probe": False,
    "select": "all", "select_bound": 0.15, "rate": "constant", "rate_kl": 0.002, "rate_rise": "step",
    "advantage": "gae", "turn_weight": 1.0, "gae_level": "token", "gae_observations": False,
    "gae_histories": "alone", "gamma": 1.0, "lam": 1.0, "truncated": "end", "overlong_penalty": 1.0,
    "whiten": True, "value_clip": 0.5, "kl_coefficient": 0.001, "kl_estimator": "k1", "kl_in": "reward",
    "entropy_coefficient": 0.001, "old_policy": "score", "mismatch": "off", "mismatch_level": "token",
    "mismatch_pooling": "mean", "mismatch_bound": 2.0, "routing_replay": "off",
}  # fmt: skip
PPO: Fields = {"segments": "token", "correction": "off"}  # 1707.06347
GRPO = PPO | {"advantage": "group"}  # 2402.03300
DR_GRPO = PPO | {"advantage": "group_mean", "aggregation": "sequence_mean_token_sum"}  # 2503.20783
MEANS = {"aggregation": "sequence_mean_token_mean", "clip_length_power": 0.0}  # and bounds for any length
EXACT = {"correction": "gradient", "correction_apply": "gradient", "correction_unit": "mean"}
PRINTED = EXACT | {"correction_strength": 1.0, "correction_floor": 0.0}
INSIDE = {"select": "ratio", "clip_low": 1 - 0.2, "clip_high": 4.0 - 1}  # ratios from 0.2 to 4 stay
LENGTHS = {"lam_length": 1.5, "lam_critic": 1.0}
PRESETS: dict[str, Fields] = {
    "ppo": PPO,
    "turn_ppo": {"correction": "off"},  # 2511.20718, as the next three and so_grpo
    "s_ppo": {"segments": "token"},
    "st_ppo": {},
    "paper": MEANS | PRINTED | {"dual_clip": None},
    "kl": PPO | {"rate": "kl"},  # 2109.11978
    "sao": PPO | INSIDE | LENGTHS | {"old_policy": "behaviour", "dual_clip": None},  # 2607.07508
    "grpo": GRPO,
    "so_grpo": {"advantage": "group"},
    "gigpo": PPO | {"advantage": "gigpo", "gamma": 0.95},  # 2505.10978
    "gspo": GRPO | MEANS | {"segments": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},  # 2507.18071
    # ratios from 0 to 5, 2506.13585
    "cispo": GRPO | {"loss": "cispo", "clip_low": 1.0, "clip_high": 5.0 - 1, "dual_clip": None},
    "dppo": GRPO | {"select": "probability", "select_bound": 0.15, "dual_clip": None},  # 2602.04879
    "dr_grpo": DR_GRPO,
    "mini_rl": DR_GRPO | {"mismatch": "truncate", "mismatch_bound": 5.0, "clip_high": 0.27},  # 2512.01374
    "distil": PPO | {"advantage": "kl", "gamma": 0.0, "kl_coefficient": 1.0, "entropy_coefficient": 0.0},
}
