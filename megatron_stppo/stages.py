"""Distribution of the trajectories, and scoring and update of a whole batch, which replay does too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.data.exchange import Played, deal
from megatron_stppo.data.finite import not_finite
from megatron_stppo.data.observed import action_rows, with_observations
from megatron_stppo.data.packing import rows_of
from megatron_stppo.describe import mean_of
from megatron_stppo.learner import Learner
from megatron_stppo.model.routing import Record, recording
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.score.logprobs import logprobs
from megatron_stppo.score.values import values
from megatron_stppo.telemetry import rows
from megatron_stppo.types import Batch
from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.update.critic_step import critic_step
from megatron_stppo.update.minibatches import minibatches
from megatron_stppo.update.ratios import Ratios, StepRatios


def distribute(learner: Learner, played: Played, iteration: int) -> Batch:
    """Return the batch of all trajectories, in which this rank holds the tokens that it trains on.

    Collective.
    """
    batch, layout = played.described(), learner.mesh.layout
    wanted = _parts(learner, batch, iteration, learner.config.update.epochs)
    return played.delivered(batch, [wanted[layout.coordinates(rank).data] for rank in range(layout.world)])


def score(learner: Learner, batch: Batch, iteration: int) -> Batch:
    """Return the batch with the log-probs of actor and reference and the critic's values filled. Collective.

    Log-probs of the reference and values are computed only if the learner has these models. The actor's
    recorded expert routes are filled too, if they are recorded.
    """
    update, actor, reference = learner.config.update, learner.actor, learner.reference
    assert actor is not None
    first_epoch = minibatches(len(batch.live_N), update.minibatches, learner.config.run.seed, iteration, 0)
    given = (batch, learner.packer, first_epoch)
    with recording(actor.chunks) as record:
        old_logprob_T = logprobs(actor.model, learner.head(actor.model), *given)
        routes_P = _routes(learner, record, batch, iteration) if record else None
    scored = replace(
        batch,
        old_logprob_T=old_logprob_T,
        routes_P=routes_P,
        reference_logprob_T=logprobs(reference, learner.head(reference), *given) if reference else None,
    )
    if learner.critic is None:
        return scored
    if learner.config.algorithm.gae_observations:
        value_R = values(learner.critic.model, with_observations(batch), *given[1:])
        return replace(scored, value_R=value_R, value_T=value_R[action_rows(batch)])
    return replace(scored, value_T=values(learner.critic.model, *given))


def _routes(learner: Learner, record: Record, batch: Batch, iteration: int) -> Tensor:
    """Return the recorded experts of the tokens that this rank trains on, 0 for others it holds. Collective.

    In later epochs a rank trains on trajectories that other data-parallel ranks have scored.
    """
    mesh, routes_P = learner.mesh, record.routes(len(batch.tokens_P))
    given, wanted = (_parts(learner, batch, iteration, n) for n in (1, learner.config.update.epochs))
    own = rows_of(batch, given[mesh.data_rank])
    dealt = deal(routes_P[own], batch, given, wanted, mesh.data_group)
    return torch.zeros_like(routes_P).index_copy(0, rows_of(batch, wanted[mesh.data_rank]), dealt)


def _parts(learner: Learner, batch: Batch, iteration: int, epochs: int) -> list[list[int]]:
    """Return the trajectories, ascending, that each data-parallel rank trains on in the first epochs."""
    config, parts = learner.config, [set[int]() for _ in range(learner.mesh.data_size)]
    for epoch in range(epochs):
        for chosen in minibatches(
            len(batch.live_N), config.update.minibatches, config.run.seed, iteration, epoch
        ):
            for part, more in zip(parts, learner.packer.partition(batch, chosen), strict=True):
                part.update(more)
    return [sorted(part) for part in parts]


def update(
    learner: Learner, batch: Batch, iteration: int, hold: bool = False
) -> tuple[dict[str, float], StepRatios | None]:
    """Make one step of the actor and one of the critic for every minibatch of every epoch. Collective.

    Return the mean of the steps' metrics, and the ratios of the last epoch, equal on every rank. Those of a
    minibatch are computed before the step on it.

    hold: the actor's steps are computed and reported, but its weights do not change. This is for a batch
    whose rewards carry no signal.
    If the batch of any rank has a number that is not finite, the whole batch is skipped, because whitening
    would spread that number over all advantages. This counts as one skipped step of each model, and None is
    returned instead of ratios.
    """
    if any_rank(bool(not_finite(batch))):
        for trainer in learner.trainers.values():
            trainer.skipped += 1
        return dict.fromkeys((f"{role}/skipped" for role in learner.trainers), 1.0), None
    ratios = Ratios(batch, learner.config.algorithm)
    steps = list(_steps(learner, batch, iteration, ratios, hold))
    if learner.config.algorithm.correction_probe and learner.mesh.rank == 0:
        rows.write_steps(learner.config.run.folder / "steps.jsonl", iteration + 1, steps)
    # first_kl_to_old is not 0 only if scoring and update compute different log-probs
    row = mean_of(steps) | ratios.row() | {"actor/first_kl_to_old": steps[0]["actor/kl_to_old"]}
    return row, ratios.last


def _steps(
    learner: Learner, batch: Batch, iteration: int, ratios: Ratios, hold: bool
) -> Iterator[dict[str, float]]:
    config, a, actor = learner.config, learner.config.algorithm, learner.actor
    assert actor is not None
    head, count, seed = learner.head(actor.model), config.update.minibatches, config.run.seed
    valued = with_observations(batch) if a.gae_observations else batch  # the critic's batch
    for epoch in range(config.update.epochs):
        for chosen in minibatches(len(batch.live_N), count, seed, iteration, epoch):
            loss = ActorLoss(batch, minibatch_weights(batch, chosen, a), a, head)
            step = actor_step(actor, loss, chosen, learner.packer, hold)
            ratios.add(step.ratios)
            if learner.critic is None:
                yield step.metrics
            else:
                yield step.metrics | critic_step(learner.critic, valued, chosen, a.value_clip, learner.packer)
