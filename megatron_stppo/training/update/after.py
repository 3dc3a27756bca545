"""The KL divergence that a whole update makes. The steps measure the policy before them, so that none of them
measures what the last one did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_stppo.algorithm.rate import capped_kl
from megatron_stppo.base.types import Batch
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.pipeline import logprobs
from megatron_stppo.training.update.minibatches import chosen_tokens
from megatron_stppo.training.update.ratios import StepRatios

PART = 8  # one of so many trajectories is scored again,
LEAST = 8  # but at least so many


def kl_after(learner: Learner, batch: Batch, first: StepRatios, chosen: Sequence[int]) -> float:
    """Return an estimate of KL(policy before the update, policy after it), nats per token. Collective.

    It takes one forward pass over an eighth of the trajectories of the first step, at least eight and one per
    data-parallel rank. Every rank takes those that it has trained on, so other numbers of data-parallel ranks
    take others. The estimate is capped_kl, 0 without tokens that carry loss.
    first: the ratios of the first step, before which the policy is that of before the update. chosen: its
    trajectories.
    """
    actor, mesh, packer = learner.actor, learner.mesh, learner.packer
    assert actor is not None
    most = math.ceil(max(LEAST, len(chosen) // PART) / mesh.data_size)
    after_T = logprobs(actor.model, learner.head(actor.model), batch, packer, [chosen], most)
    sample = [n for part in packer.partition(batch, chosen) for n in part[:most]]
    in_T = first.live_T & chosen_tokens(batch, sample)
    return capped_kl(after_T, first.logprob_T, in_T)
