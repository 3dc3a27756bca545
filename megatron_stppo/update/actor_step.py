"""One optimizer step of the actor: clipped surrogate at the chosen segment level, and the clipping-bias
correction.

The gradient is linear in the loss, so dividing it by ||C|| is one scalar per minibatch, known after the last
microbatch: it is applied to the accumulated main gradients, after the data-parallel reduction and before
clipping by norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.aggregation import token_weights
from megatron_stppo.algorithm.correction import calibrated_norm, correction_scale, in_unit
from megatron_stppo.algorithm.penalties import kl, mismatch_weight, weighted_sum
from megatron_stppo.algorithm.ratio import segment_offsets
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import Packer, forward_backward, share, total
from megatron_stppo.model.token_logprob import token_logprob
from megatron_stppo.ops.clipped_surrogate import ClippedSurrogate
from megatron_stppo.parallel.groups import Place
from megatron_stppo.types import Batch
from megatron_stppo.update.minibatches import chosen_tokens

# What every microbatch adds up, over all ranks; in this order in its record.
SUMS = (
    "objective", "kl", "entropy", "kl_to_old", "clipped",
    "coefficient_bias_sq", "coefficient_grad_sq", "logit_bias_sq", "logit_grad_sq",
)  # fmt: skip


@dataclass(frozen=True)
class ActorLoss:
    """The loss of a minibatch; called once per microbatch on the last pipeline stage."""

    batch: Batch
    weight_T: Tensor  # c_t times the mismatch weight; 0 outside the minibatch
    algorithm: AlgorithmConfig
    place: Place
    vocab_size: int
    temperature: float

    def __call__(self, logits: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(loss, record): the part of -J + KL + entropy terms that these tokens make, and SUMS."""
        a = self.algorithm
        logprob_T, entropy_T, sum_p_sq_T = self.logprob(logits, microbatch)
        weight_T = self.rows(self.weight_T, microbatch)
        out = self.surrogate(logprob_T, microbatch, sum_p_sq_T)
        entropy = weighted_sum(entropy_T, weight_T)
        loss = -out.objective - a.entropy_coefficient * entropy
        kl_loss = torch.zeros_like(loss)
        if a.kl_in == "loss" and a.kl_coefficient > 0:
            reference_T = self.rows(self.batch.reference_logprob_T, microbatch)
            kl_loss = weighted_sum(kl(a.kl_estimator, logprob_T, reference_T), weight_T)
            loss = loss + a.kl_coefficient * kl_loss
        sizes = (out.bias_sq, out.grad_sq, out.logit_bias_sq, out.logit_grad_sq)
        record = [out.objective, kl_loss, entropy, out.kl_k3 * out.tokens, out.clipped, *sizes]
        return loss, torch.stack([value.detach().double() for value in record])

    def bias(self, logits: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """A loss whose gradient is -C: the clipped terms alone."""
        logprob_T, _, _ = self.logprob(logits, microbatch)
        bias_T = self.surrogate(logprob_T.detach(), microbatch, with_bias=True).bias_T
        assert bias_T is not None
        loss = -(bias_T * logprob_T).sum()
        return loss, loss.detach().reshape(1)

    def logprob(self, logits: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
        return token_logprob(logits, microbatch, self.place, self.vocab_size, self.temperature)

    def surrogate(
        self,
        logprob_T: Tensor,
        microbatch: Microbatch,
        sum_p_sq_T: Tensor | None = None,
        with_bias: bool = False,
    ) -> ClippedSurrogate:
        a, segments = self.algorithm, self.algorithm.segments
        offsets = {"token": None, "turn": microbatch.turn_offsets, "sequence": microbatch.action_offsets}
        return ops.clipped_surrogate(
            logprob_T,
            self.rows(self.batch.old_logprob_T, microbatch),
            self.rows(self.batch.advantage_T, microbatch),
            offsets[segments],
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
            weight=self.rows(self.weight_T, microbatch),
            pooling=a.pooling,
            sum_p_sq=None if sum_p_sq_T is None else sum_p_sq_T.detach(),
            with_bias=with_bias,
        )

    @staticmethod
    def rows(value_T: Tensor | None, microbatch: Microbatch) -> Tensor:
        assert value_T is not None
        return value_T[microbatch.rows_T].to(microbatch.target_T.device)


def actor_step(actor: Trainer, loss: ActorLoss, chosen: Sequence[int], packer: Packer) -> dict[str, float]:
    """Steps on the chosen trajectories; nothing changes, on any rank, if loss or gradient is not finite."""
    a, place, tokens = loss.algorithm, loss.place, int((loss.weight_T != 0).sum())
    microbatches = packer.pack(loss.batch, share(loss.batch, chosen, place))
    actor.zero()
    records = forward_backward(actor.model, microbatches, loss)
    sums = dict(zip(SUMS, total(records, len(SUMS), place).tolist(), strict=True))
    norm = actor.reduce()
    bias_norm, scale = 0.0, 1.0
    if a.correction != "off" and sums["clipped"] > 0:
        bias_norm = _bias_norm(actor, loss, microbatches, sums, norm)
        bias_norm = in_unit(bias_norm, a.correction_unit, tokens)
        scale = correction_scale(bias_norm, sums["clipped"], a.correction_floor)
    finite = all(map(math.isfinite, (*sums.values(), bias_norm)))
    on_gradient = a.correction_apply == "gradient"
    stepped = actor.step(
        norm if finite else math.nan, scale if on_gradient else 1.0, 1.0 if on_gradient else scale
    )
    per_token = 1 / max(tokens, 1)
    return {
        "actor/objective": sums["objective"],
        "actor/entropy": sums["entropy"],
        "actor/kl_loss": sums["kl"],
        "actor/kl_to_old": sums["kl_to_old"] * per_token,
        "actor/clip_fraction": sums["clipped"] * per_token,
        "actor/clipping_bias": bias_norm,
        "actor/correction_scale": scale,
        "actor/gradient_norm": norm,
        "actor/skipped": float(not stepped),
    }


def _bias_norm(
    actor: Trainer, loss: ActorLoss, microbatches: Sequence[Microbatch], sums: dict[str, float], norm: float
) -> float:
    """||C|| of the minibatch in parameter space, mean over tokens, by the configured estimator."""
    estimator = loss.algorithm.correction
    if estimator != "gradient":
        return calibrated_norm(sums[f"{estimator}_bias_sq"], sums[f"{estimator}_grad_sq"], norm)
    with actor.gradients_kept():
        actor.zero()
        forward_backward(actor.model, microbatches, loss.bias)
        return actor.reduce()


def minibatch_weights(batch: Batch, chosen: Sequence[int], a: AlgorithmConfig) -> Tensor:
    """c_t of the chosen trajectories' live tokens, times the train/serve mismatch weight; float32 [T], else
    0."""
    live_T = batch.live_T & chosen_tokens(batch, chosen)
    weight_T = token_weights(a.aggregation, live_T, batch.turn_offsets, batch.action_offsets)
    if a.mismatch == "off":
        return weight_T
    assert batch.old_logprob_T is not None
    offsets = segment_offsets(a.mismatch_level, batch.turn_offsets, batch.action_offsets)
    factor_T, _ = mismatch_weight(
        a.mismatch, batch.old_logprob_T, batch.rollout_logprob_T, offsets, a.mismatch_bound
    )
    return weight_T * factor_T
