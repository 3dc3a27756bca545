"""One optimizer step of the actor: the clipped surrogate and the clipping-bias correction.

The gradient is linear in the loss, so dividing the loss by ||C|| multiplies the gradient by one scalar per
minibatch. The scalar is known after the last micro-batch. With `correction_apply: step`, the default, it
multiplies the learning rate of this step. With `gradient` it multiplies the accumulated main gradients, after
the data-parallel reduction and before clipping by norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.aggregation import token_weights
from megatron_stppo.algorithm.correction import (
    Estimator,
    calibrated_norm,
    correction_scale,
    in_unit,
    removed_share,
)
from megatron_stppo.algorithm.own import OwnLoss
from megatron_stppo.algorithm.penalties import kl, mismatch_weight, weighted_sum
from megatron_stppo.algorithm.rate import RATES, RateInput, capped_kl, may_rise, measured_kl
from megatron_stppo.algorithm.ratio import segment_offsets
from megatron_stppo.algorithm.selection import leaving
from megatron_stppo.algorithm.surrogate import decided
from megatron_stppo.base.types import EstimatedBatch, Minibatch, ScoredBatch
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.division import Packer, chosen_tokens
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import forward_backward, gather, total
from megatron_stppo.model.policy_head import ActionTokens, PolicyHead
from megatron_stppo.ops.clipped_surrogate import ClippedSurrogate
from megatron_stppo.ops.extension import to_device
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.training.update.own import own_surrogate
from megatron_stppo.training.update.ratios import StepRatios

# Entries of MicrobatchRecord.sums, in this order.
SUMS = (
    "objective", "kl", "entropy", "kl_to_old", "clipped",
    "coefficient_bias_sq", "coefficient_grad_sq", "logit_bias_sq", "logit_grad_sq",
    "computed", "packed",  # tokens: those that are computed, and those of the trajectories
)  # fmt: skip
FREE: tuple[Estimator, ...] = ("coefficient", "logit")  # estimators of ||C|| that need no extra backward


@dataclass(frozen=True)
class MicrobatchRecord:
    """What a micro-batch contributes to the metrics and ratios of its step."""

    sums: Tensor  # float64, see SUMS; to be added up over micro-batches and ranks
    logprob_T: Tensor  # float32 [T] of the micro-batch


@dataclass(frozen=True)
class ActorStep:
    """What an optimizer step of the actor computed. Equal on every rank."""

    metrics: dict[str, float]
    acting: dict[str, float]  # metrics of a step that bounds or a controller could change; {} for others
    ratios: StepRatios
    distinct: tuple[float, float]  # tokens that were computed, and those of the trajectories


@dataclass(frozen=True)
class ActorLoss:
    """The actor's loss of a minibatch, called once per micro-batch on the last pipeline stage."""

    batch: EstimatedBatch  # without old_logprob_T the current policy is the old one, as in the first step
    weight_T: Tensor  # c_t times the mismatch weight; 0 outside the minibatch
    algorithm: AlgorithmConfig
    head: PolicyHead  # its segments are those of the ratio
    own: OwnLoss | None = None  # in place of the clipped surrogate

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, MicrobatchRecord]:
        """Return (loss, record): the micro-batch's share of -J + KL + entropy terms, and its record."""
        loss, sums, logprob_T = self.head.loss(hidden, microbatch, self.terms)
        distinct = to_device(torch.tensor(microbatch.distinct, dtype=sums.dtype), sums.device)
        return loss, MicrobatchRecord(torch.cat([sums, distinct]), logprob_T)

    def bias(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return a loss whose gradient is -C, made of the clipped terms only, and its value as the record."""
        loss, record, _ = self.head.loss(hidden, microbatch, self.bias_terms)
        return loss, record

    @cached_property
    def advantage_T(self) -> Tensor:
        """The advantages whose signs decide what is clipped, float32 [T]."""
        a, batch = self.algorithm, self.batch
        if a.clip_decision == "token":
            return batch.advantage_T
        offsets = segment_offsets(a.segments, batch.turn_offsets, batch.action_offsets)
        return decided(batch.advantage_T, self.weight_T, offsets)

    def terms(self, tokens: ActionTokens) -> tuple[Tensor, Tensor]:
        """Return (loss, SUMS without the last two) of some action tokens."""
        a, logprob_T = self.algorithm, tokens.logprob_T
        weight_T = self.at(tokens, self.weight_T)
        out = self.surrogate(tokens, sum_p_sq=tokens.sum_p_sq_T.detach())
        entropy, kl_loss = weighted_sum(tokens.entropy_T, weight_T), torch.zeros_like(out.objective)
        loss = -out.objective
        if a.entropy_coefficient > 0:
            loss = loss - a.entropy_coefficient * entropy
        if a.kl_in == "loss" and a.kl_coefficient > 0:
            reference_T = self.at(tokens, self.batch.reference_logprob_T)
            kl_loss = weighted_sum(kl(a.kl_estimator, logprob_T, reference_T), weight_T)
            loss = loss + a.kl_coefficient * kl_loss
        sizes = (out.bias_sq, out.grad_sq, out.logit_bias_sq, out.logit_grad_sq)
        record = [out.objective, kl_loss, entropy, out.kl_k3 * out.tokens, out.clipped, *sizes]
        return loss, torch.stack(record).detach().double()

    def bias_terms(self, tokens: ActionTokens) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            bias_T = self.surrogate(tokens, with_bias=True).bias_T
        assert bias_T is not None
        loss = -(bias_T * tokens.logprob_T).sum()
        return loss, loss.detach().reshape(1)

    def surrogate(self, tokens: ActionTokens, **wanted: Any) -> ClippedSurrogate:
        a, old_T = self.algorithm, self.batch.old_logprob_T
        old_T = tokens.logprob_T.detach() if old_T is None else self.at(tokens, old_T)
        weight_T, advantage_T = self.at(tokens, self.weight_T), self.at(tokens, self.advantage_T)
        group = self.head.mesh.context_group if self.head.mesh.context_size > 1 else None
        if a.select != "all":
            add_up = partial(dist.all_reduce, group=group) if group is not None else lambda sums: None
            left_T = leaving(a, tokens.logprob_T, old_T, advantage_T, tokens.offsets, add_up)
            advantage_T = advantage_T.masked_fill(left_T, 0)
        if self.own is not None:
            return own_surrogate(self.own, tokens.logprob_T, old_T, advantage_T, weight_T, tokens.offsets)
        clip_low, clip_high, power = a.clip_bounds
        return ops.clipped_surrogate(
            tokens.logprob_T,
            old_T,
            advantage_T,
            tokens.offsets,
            dual_clip=a.dual_clip,
            clip_low=clip_low,
            clip_high=clip_high,
            clip_length_power=power,
            weight=weight_T,
            pooling=a.pooling,
            group=group,
            **wanted,
        )

    @staticmethod
    def at(tokens: ActionTokens, value_T: Tensor | None) -> Tensor:
        """Return a column of the batch at these tokens, on their device."""
        assert value_T is not None
        return to_device(value_T[tokens.rows_T], tokens.logprob_T.device)


def actor_step(
    actor: Trainer,
    loss: ActorLoss,
    minibatch: Minibatch,
    packer: Packer,
    hold: bool = False,
    index: int = 0,
    steps: int = 1,
) -> ActorStep:
    """Make one optimizer step on the trajectories of the minibatch. Collective.

    If the loss or the gradient is not finite on any rank, the step is skipped on all ranks. With `hold`, and
    where no token carries loss, everything is computed and reported, but weights and optimizer state do not
    change: Adam would take a step on its momentum and the weight decay alone.
    index: of the step in its iteration, from 0. steps: of an iteration.
    """
    a, mesh, tokens = loss.algorithm, loss.head.mesh, int((loss.weight_T != 0).sum())
    hold = hold or tokens == 0
    microbatches = packer.pack(loss.batch, minibatch)
    actor.zero()
    records = forward_backward(actor.model, microbatches, loss)
    recorded = total([record.sums for record in records], len(SUMS), mesh)
    sums = dict(zip(SUMS, recorded.tolist(), strict=True))
    norm = actor.reduce()
    # all ranks must take the same branch, because a second backward pass is collective
    finite = not any_rank(not all(map(math.isfinite, (*sums.values(), norm))))
    bias_norms, bias_norm, scale = dict.fromkeys(_estimators(a), 0.0), 0.0, 1.0
    weight = float(loss.weight_T.double().sum())
    memory = actor.memory
    sizes = {"tokens": tokens, "weight": weight, "gradient_norm": norm}
    if finite and sums["clipped"] > 0:
        bias_norms = {
            name: in_unit(value, a.correction_unit, **sizes)
            for name, value in _bias_norms(actor, loss, microbatches, sums, norm).items()
        }
        if a.correction != "off":
            bias_norm = bias_norms[a.correction]
            scale = correction_scale(a.correction_strength * bias_norm, sums["clipped"], a.correction_floor)
    logprob_T = gather(microbatches, [record.logprob_T for record in records], len(loss.weight_T), mesh)
    compared = replace(loss.batch, advantage_T=loss.advantage_T)
    ratios = StepRatios.of(compared, logprob_T, loss.weight_T, minibatch.chosen, a)
    per_token, per_weight = 1 / max(tokens, 1), 1 / weight if weight > 0 else 1.0
    factor = rate_scale(actor, loss, ratios, index, steps) if finite else memory.rate_scale
    rate, on_gradient = actor.learning_rate, a.correction_apply == "gradient"
    on_rate = factor if on_gradient else scale * factor
    finite = finite and math.isfinite(bias_norm)
    stepped = actor.step(norm, scale if on_gradient else 1.0, on_rate, finite=finite, hold=hold)
    moved = stepped and not hold
    if moved:
        actor.memory = replace(memory, rate_scale=factor)
    metrics = {
        "actor/objective": sums["objective"],
        "actor/entropy": sums["entropy"] * per_weight,
        "actor/kl_loss": sums["kl"] * per_weight,
        "actor/kl_to_old": sums["kl_to_old"] * per_token,
        "actor/clip_fraction": sums["clipped"] * per_token,
        "actor/selected": ratios.selected,
        "actor/clipping_bias": bias_norm,
        **{f"actor/clipping_bias_{name}": value for name, value in bias_norms.items()},
        "actor/correction_scale": scale,
        "actor/gradient_norm": norm,
        "actor/scaled_gradient_norm": norm * scale if on_gradient else norm,
        "actor/lr": rate,
        "actor/rate_scale": factor,
        "actor/effective_lr": rate * on_rate if moved else 0.0,
        "actor/skipped": float(not stepped),
        "actor/held": float(hold),
    }
    acting = {}
    at_old = index == 0 and a.old_policy == "score"  # the first step's ratios are 1
    if moved and not (at_old and a.rate == "constant"):
        acting["actor/effective_share"] = on_rate
    if moved and a.clips and not at_old:
        acting["actor/removed_share"] = removed_share(sums["logit_bias_sq"], sums["logit_grad_sq"])
    return ActorStep(metrics, acting, ratios, (sums["computed"], sums["packed"]))


def rate_scale(actor: Trainer, loss: ActorLoss, ratios: StepRatios, index: int, steps: int) -> float:
    """Return the factor of algorithm.rate."""
    a, batch, memory = loss.algorithm, loss.batch, actor.memory
    old_T = ratios.logprob_T if batch.old_logprob_T is None else batch.old_logprob_T
    to_old = partial(capped_kl, ratios.logprob_T, old_T, ratios.live_T)
    from_engine = a.old_policy == "behaviour"
    kl = measured_kl(to_old, memory.kl_after, index, steps, from_engine)
    rises = may_rise(a.rate_rise, index, steps, from_engine)
    return RATES[a.rate](RateInput(index, steps, memory.rate_scale, kl, a.rate_profile, a.rate_kl, rises))


def _estimators(a: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the estimators of ||C||: those in FREE, and `gradient` if it is configured."""
    return (*FREE, "gradient") if a.correction == "gradient" or a.correction_probe else FREE


def _bias_norms(
    actor: Trainer, loss: ActorLoss, microbatches: Sequence[Microbatch], sums: dict[str, float], norm: float
) -> dict[str, float]:
    """Return ||C|| of the minibatch by each of _estimators, in parameter space and in the loss's unit."""
    found: dict[str, float] = {
        name: calibrated_norm(sums[f"{name}_bias_sq"], sums[f"{name}_grad_sq"], norm) for name in FREE
    }
    if "gradient" in _estimators(loss.algorithm):
        with actor.gradients_kept():
            actor.zero()
            forward_backward(actor.model, microbatches, loss.bias)
            found["gradient"] = actor.reduce()
    return found


def minibatch_weights(batch: ScoredBatch, chosen: Sequence[int], a: AlgorithmConfig) -> Tensor:
    """Return c_t times the weight for train/serve mismatch, float32 [T].

    It is 0 for tokens that are not live or whose trajectory is not chosen, and for those that
    algorithm.mismatch masks; c_t does not count them.
    """
    live_T, offsets = batch.live_T & chosen_tokens(batch, chosen), (batch.turn_offsets, batch.action_offsets)
    if a.mismatch == "off":
        return token_weights(a.aggregation, live_T, *offsets, a.aggregation_length, batch.first_N)
    assert batch.old_logprob_T is not None
    factor_T, _ = mismatch_weight(
        a.mismatch,
        batch.old_logprob_T,
        batch.rollout_logprob_T,
        segment_offsets(a.mismatch_level, *offsets),
        a.mismatch_bound,
        lower=a.mismatch_lower,
        pooling=a.mismatch_pooling,
    )
    kept_T = live_T & (factor_T != 0)
    weight_T = token_weights(a.aggregation, kept_T, *offsets, a.aggregation_length, batch.first_N)
    return (weight_T * factor_T).masked_fill(weight_T == 0, 0)  # a failed trajectory may hold NaN
