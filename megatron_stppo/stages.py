"""Score and update of a whole batch, whoever played it: the training loop and the replay share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.data.finite import not_finite
from megatron_stppo.describe import mean_of
from megatron_stppo.learner import Learner
from megatron_stppo.model.pipeline import total
from megatron_stppo.model.routing import recording
from megatron_stppo.parallel.collectives import all_agree
from megatron_stppo.score.logprobs import logprobs
from megatron_stppo.score.values import values
from megatron_stppo.types import Batch
from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.update.critic_step import critic_step
from megatron_stppo.update.minibatches import minibatches


def score(learner: Learner, batch: Batch, iteration: int) -> Batch:
    """What actor, reference and critic say about the action tokens. Collective."""
    update, actor, reference = learner.config.update, learner.actor, learner.reference
    assert actor is not None
    first_epoch = minibatches(len(batch.live_N), update.minibatches, learner.config.run.seed, iteration, 0)
    given = (batch, learner.packer, first_epoch)
    with recording(actor.chunks) as record:
        old_logprob_T = logprobs(actor.model, learner.head(actor.model), *given)
        routes_P = record.routes(len(batch.tokens_P)) if record else None
    return replace(
        batch,
        old_logprob_T=old_logprob_T,
        routes_P=routes_P,
        reference_logprob_T=logprobs(reference, learner.head(reference), *given) if reference else None,
        value_T=values(learner.critic.model, *given) if learner.critic else None,
    )


def update(learner: Learner, batch: Batch, iteration: int) -> tuple[dict[str, float], Tensor | None]:
    """Every minibatch of every epoch: one step of the actor, one of the critic. Collective.

    The mean of what they report; and the log-probs that the last epoch computed, each before the step on its
    minibatch: float64 [T] on the host, equal on every rank.

    A batch with a number that is not finite, on any rank, is refused as a whole: whitening would spread it
    over all advantages. That counts as one skipped step of each model, and gives no log-probs.
    """
    if all_agree(bool(not_finite(batch))):
        for trainer in learner.trainers.values():
            trainer.skipped += 1
        return dict.fromkeys((f"{role}/skipped" for role in learner.trainers), 1.0), None
    seen_T = torch.zeros(len(batch.action_index_T))
    steps = list(_steps(learner, batch, iteration, seen_T))
    # first_kl_to_old: 0, or scores and updates differ
    row = mean_of(steps) | {"actor/first_kl_to_old": steps[0]["actor/kl_to_old"]}
    return row, total([seen_T], len(seen_T), learner.place)


def _steps(learner: Learner, batch: Batch, iteration: int, seen_T: Tensor) -> Iterator[dict[str, float]]:
    """`seen_T` is left with the last epoch's log-probs of this rank's tokens, 0 elsewhere."""
    config, a, actor = learner.config, learner.config.algorithm, learner.actor
    assert actor is not None
    head, count, seed = learner.head(actor.model), config.update.minibatches, config.run.seed
    for epoch in range(config.update.epochs):
        seen_T.zero_()  # a trajectory may be another rank's in every epoch
        for chosen in minibatches(len(batch.live_N), count, seed, iteration, epoch):
            loss = ActorLoss(batch, minibatch_weights(batch, chosen, a), a, head)
            step = actor_step(actor, loss, chosen, learner.packer)
            for rows, logprob in loss.seen:
                seen_T[rows] = logprob.cpu()
            if learner.critic is not None:
                step |= critic_step(learner.critic, batch, chosen, a.value_clip, learner.packer)
            yield step
