"""One optimizer step of the actor: the clipped surrogate and the clipping-bias correction.

The gradient is linear in the loss, so dividing the loss by ||C|| multiplies the gradient by one scalar per
minibatch. The scalar is known after the last micro-batch. It is applied to the accumulated main gradients,
after the data-parallel reduction and before clipping by norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.aggregation import token_weights
from megatron_stppo.algorithm.correction import Estimator, calibrated_norm, correction_scale, in_unit
from megatron_stppo.algorithm.penalties import kl, mismatch_weight, weighted_sum
from megatron_stppo.algorithm.ratio import segment_offsets
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import Packer, forward_backward, put_together, total
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.ops.clipped_surrogate import ClippedSurrogate
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.types import Batch
from megatron_stppo.update.minibatches import chosen_tokens

# Entries of a micro-batch's record, in this order. They are summed over micro-batches and ranks.
SUMS = (
    "objective", "kl", "entropy", "kl_to_old", "clipped",
    "coefficient_bias_sq", "coefficient_grad_sq", "logit_bias_sq", "logit_grad_sq",
)  # fmt: skip
FREE: tuple[Estimator, ...] = ("coefficient", "logit")  # estimators of ||C|| that need no extra backward


@dataclass(frozen=True)
class ActorLoss:
    """The actor's loss of a minibatch, called once per micro-batch on the last pipeline stage."""

    batch: Batch
    weight_T: Tensor  # c_t times the mismatch weight; 0 outside the minibatch
    algorithm: AlgorithmConfig
    head: PolicyHead  # its segments are those of the ratio
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (rows into T, log-probs), one per call

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return (loss, record): the micro-batch's share of -J + KL + entropy terms, and its SUMS."""
        return self.head.loss(hidden, microbatch, partial(self.terms, microbatch))

    def bias(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return a loss whose gradient is -C, made of the clipped terms only, and its value as the record."""
        return self.head.loss(hidden, microbatch, partial(self.bias_terms, microbatch))

    def policy_logprobs(self) -> Tensor:
        """Return the log-probs computed so far on all ranks, float32 [T] on the host; 0 for other tokens.

        Collective.
        """
        out_T = torch.zeros(len(self.weight_T))
        for rows, logprob_T in self.seen:
            out_T[rows] = logprob_T.cpu()
        return put_together(out_T, self.head.mesh)

    def terms(
        self,
        microbatch: Microbatch,
        logprob_T: Tensor,
        entropy_T: Tensor,
        sum_p_sq_T: Tensor,
        first: int,
        last: int,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, record) for the micro-batch's action tokens [first, last).

        offsets: their segments; None: every token is a segment.
        """
        a, rows = self.algorithm, microbatch.rows_T[first:last]
        weight_T = self.at(rows, self.weight_T, logprob_T)
        self.seen.append((rows, logprob_T.detach()))
        out = self.surrogate(rows, logprob_T, offsets, sum_p_sq=sum_p_sq_T.detach())
        entropy, kl_loss = weighted_sum(entropy_T, weight_T), torch.zeros_like(out.objective)
        loss = -out.objective
        if a.entropy_coefficient > 0:
            loss = loss - a.entropy_coefficient * entropy
        if a.kl_in == "loss" and a.kl_coefficient > 0:
            reference_T = self.at(rows, self.batch.reference_logprob_T, logprob_T)
            kl_loss = weighted_sum(kl(a.kl_estimator, logprob_T, reference_T), weight_T)
            loss = loss + a.kl_coefficient * kl_loss
        sizes = (out.bias_sq, out.grad_sq, out.logit_bias_sq, out.logit_grad_sq)
        record = [out.objective, kl_loss, entropy, out.kl_k3 * out.tokens, out.clipped, *sizes]
        return loss, torch.stack([value.detach().double() for value in record])

    def bias_terms(
        self,
        microbatch: Microbatch,
        logprob_T: Tensor,
        _: Tensor,
        __: Tensor,
        first: int,
        last: int,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows = microbatch.rows_T[first:last]
        bias_T = self.surrogate(rows, logprob_T.detach(), offsets, with_bias=True).bias_T
        assert bias_T is not None
        loss = -(bias_T * logprob_T).sum()
        return loss, loss.detach().reshape(1)

    def surrogate(
        self, rows: Tensor, logprob_T: Tensor, offsets: Tensor | None, **wanted: Any
    ) -> ClippedSurrogate:
        a, mesh = self.algorithm, self.head.mesh
        return ops.clipped_surrogate(
            logprob_T,
            self.at(rows, self.batch.old_logprob_T, logprob_T),
            self.at(rows, self.batch.advantage_T, logprob_T),
            offsets,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
            weight=self.at(rows, self.weight_T, logprob_T),
            pooling=a.pooling,
            group=mesh.context_group if mesh.context_size > 1 else None,
            **wanted,
        )

    @staticmethod
    def at(rows: Tensor, value_T: Tensor | None, like: Tensor) -> Tensor:
        """Return these rows of a column of the batch, on the device of `like`."""
        assert value_T is not None
        return value_T[rows].to(like.device)


def actor_step(
    actor: Trainer, loss: ActorLoss, chosen: Sequence[int], packer: Packer, hold: bool = False
) -> dict[str, float]:
    """Make one optimizer step on the chosen trajectories and return the step's metrics. Collective.

    If the loss or the gradient is not finite on any rank, the step is skipped on all ranks. With `hold`
    everything is computed and reported, but weights and optimizer state do not change.
    """
    a, mesh, tokens = loss.algorithm, loss.head.mesh, int((loss.weight_T != 0).sum())
    microbatches = packer.pack(loss.batch, chosen)
    actor.zero()
    records = forward_backward(actor.model, microbatches, loss)
    sums = dict(zip(SUMS, total(records, len(SUMS), mesh).tolist(), strict=True))
    norm = actor.reduce()
    # all ranks must take the same branch, because a second backward pass is collective
    finite = not any_rank(not all(map(math.isfinite, (*sums.values(), norm))))
    bias_norms, bias_norm, scale = dict.fromkeys(_estimators(a), 0.0), 0.0, 1.0
    weight = float(loss.weight_T.double().sum())
    if finite and sums["clipped"] > 0:
        bias_norms = {
            name: in_unit(value, a.correction_unit, tokens=tokens, weight=weight, gradient_norm=norm)
            for name, value in _bias_norms(actor, loss, microbatches, sums, norm).items()
        }
        if a.correction != "off":
            bias_norm = bias_norms[a.correction]
            scale = correction_scale(a.correction_strength * bias_norm, sums["clipped"], a.correction_floor)
    on_gradient, usable = a.correction_apply == "gradient", finite and math.isfinite(bias_norm)
    rate = actor.learning_rate
    stepped = actor.step(
        norm if usable else math.nan, scale if on_gradient else 1.0, 1.0 if on_gradient else scale, hold
    )
    per_token, per_weight = 1 / max(tokens, 1), 1 / weight if weight > 0 else 1.0
    return {
        "actor/objective": sums["objective"],
        "actor/entropy": sums["entropy"] * per_weight,
        "actor/kl_loss": sums["kl"] * per_weight,
        "actor/kl_to_old": sums["kl_to_old"] * per_token,
        "actor/clip_fraction": sums["clipped"] * per_token,
        "actor/clipping_bias": bias_norm,
        **{f"actor/clipping_bias_{name}": value for name, value in bias_norms.items()},
        "actor/correction_scale": scale,
        "actor/gradient_norm": norm,
        "actor/scaled_gradient_norm": norm * scale if on_gradient else norm,
        "actor/lr": rate,
        "actor/skipped": float(not stepped),
        "actor/held": float(hold),
    }


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


def minibatch_weights(batch: Batch, chosen: Sequence[int], a: AlgorithmConfig) -> Tensor:
    """Return c_t times the weight for train/serve mismatch, float32 [T].

    It is 0 for tokens that are not live or whose trajectory is not chosen.
    """
    live_T = batch.live_T & chosen_tokens(batch, chosen)
    offsets = (batch.turn_offsets, batch.action_offsets)
    weight_T = token_weights(a.aggregation, live_T, *offsets, a.aggregation_length)
    if a.mismatch == "off":
        return weight_T
    assert batch.old_logprob_T is not None
    segments = segment_offsets(a.mismatch_level, *offsets)
    factor_T, _ = mismatch_weight(
        a.mismatch, batch.old_logprob_T, batch.rollout_logprob_T, segments, a.mismatch_bound
    )
    return (weight_T * factor_T).masked_fill(weight_T == 0, 0)  # a failed trajectory may hold NaN
