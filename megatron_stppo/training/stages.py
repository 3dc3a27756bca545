"""Distribution of the trajectories, and scoring and update of a whole batch, which replay does too."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.algorithm.own import OwnAdvantage, OwnLoss
from megatron_stppo.algorithm.rate import capped_kl
from megatron_stppo.base.types import (
    Batch,
    DividedBatch,
    EstimatedBatch,
    Minibatch,
    ScoredBatch,
    ScoredT,
    UpdatedBatch,
)
from megatron_stppo.data.division import chosen_tokens, minibatches
from megatron_stppo.data.exchange import Played, deal
from megatron_stppo.data.packing import rows_of
from megatron_stppo.data.validity import not_finite
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.pipeline import logprobs, values
from megatron_stppo.model.routing_replay import Record, recording, routed_layers
from megatron_stppo.observe.describe import current_mismatch, mean_of
from megatron_stppo.observe.run_files import write_steps
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.training.advantage import action_rows, estimate, with_observations
from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.training.update.critic_step import critic_step
from megatron_stppo.training.update.ratios import Ratios, StepRatios

# actor/kl_after: one of PART trajectories is scored again, but at least so many
PART, LEAST = 8, 8


def distribute(learner: Learner, played: Played, iteration: int) -> DividedBatch:
    """Return the batch of all trajectories, in which this rank holds the tokens that it trains on.

    Collective.
    """
    batch, layout = divided(learner, played.described(), iteration), learner.mesh.layout
    parts = _parts(batch.epochs)
    wanted = [parts[layout.coordinates(rank).data] for rank in range(layout.world)]
    batch, shape = played.delivered(batch, wanted), learner.shape
    if not learner.config.replays_rollout or learner.actor is None:
        return batch
    routes_P = played.routes(batch, wanted, shape.layers, shape.experts_per_token, shape.experts)
    return replace(batch, routes_P=routes_P[:, routed_layers(learner.actor.chunks)])


def divided(learner: Learner, batch: Batch, iteration: int) -> DividedBatch:
    """Return the batch with the minibatches of the iteration's update, equal on every rank.

    The stages only compute on trajectories whose tokens the rank holds: those of its parts.
    """
    update, seed = learner.config.update, learner.config.run.seed
    steps = (
        minibatches(batch.first_N, update.minibatches, seed, iteration, epoch)
        for epoch in range(update.epochs)
    )
    epochs = tuple(tuple(learner.packer.divide(batch, chosen) for chosen in epoch) for epoch in steps)
    return DividedBatch.of(batch, epochs=epochs)


def _parts(epochs: Iterable[Iterable[Minibatch]]) -> list[list[int]]:
    """Return the trajectories, ascending, that each data-parallel rank trains on in these epochs."""
    of_rank = zip(*(minibatch.parts for epoch in epochs for minibatch in epoch), strict=True)
    return [sorted(set(itertools.chain(*parts))) for parts in of_rank]


def score(learner: Learner, batch: DividedBatch) -> ScoredBatch:
    """Return the batch with the old and reference log-probs and the critic's values filled. Collective.

    Log-probs of the reference and values are computed only if the learner has these models. The old log-probs
    are left to `update` if config.old_logprob_source is "update".
    """
    reference, given = learner.reference, (learner.packer, batch.epochs[0])
    learner.packer.keep(batch.epochs[0])  # until the first epoch of `update` ends
    scored = _OLD_LOGPROBS[learner.config.old_logprob_source](learner, ScoredBatch.of(batch))
    if reference is not None:
        reference_T = logprobs(reference, learner.head(reference), batch, *given)
        scored = replace(scored, reference_logprob_T=reference_T)
    if learner.critic is None:
        return scored
    if learner.config.algorithm.gae_observations:
        value_R = values(learner.critic.model, with_observations(batch), *given)
        return replace(scored, value_R=value_R, value_T=value_R[action_rows(batch)])
    return replace(scored, value_T=values(learner.critic.model, batch, *given))


def _with_old(learner: Learner, batch: ScoredT) -> ScoredT:
    """Return the batch with the actor's log-probs as old_logprob_T. Collective.

    The actor's expert routes are recorded and filled too with algorithm.routing_replay=old_policy. With
    `rollout` the batch has the engine's already.
    """
    actor, given = learner.actor, learner.config.replays_rollout
    assert actor is not None and (batch.routes_P is not None or not given)
    with recording(() if given else actor.chunks) as record:
        old_T = logprobs(actor.model, learner.head(actor.model), batch, learner.packer, batch.epochs[0])
        routes_P = _routes(learner, record, batch) if record else batch.routes_P
    return replace(batch, old_logprob_T=old_T, routes_P=routes_P)


def with_behaviour(batch: ScoredBatch) -> ScoredBatch:
    """Return the batch with the engine's log-probs as old_logprob_T: a copy, because a dump refuses tensors
    that share memory."""
    return replace(batch, old_logprob_T=batch.rollout_logprob_T.clone())


# config.old_logprob_source: what `score` does about the old log-probs
_OLD_LOGPROBS: dict[str, Callable[[Learner, ScoredBatch], ScoredBatch]] = {
    "score": _with_old,
    "update": lambda learner, batch: batch,
    "behaviour": lambda learner, batch: with_behaviour(batch),
}


def _routes(learner: Learner, record: Record, batch: DividedBatch) -> Tensor:
    """Return the recorded experts of the tokens that this rank trains on, 0 for others it holds. Collective.

    In later epochs a rank trains on trajectories that other data-parallel ranks have scored.
    """
    mesh, routes_P = learner.mesh, record.routes(len(batch.tokens_P))
    given, wanted = _parts(batch.epochs[:1]), _parts(batch.epochs)
    own = rows_of(batch, given[mesh.data_rank])
    dealt = deal(routes_P[own], batch, given, wanted, mesh.data_group)
    return torch.zeros_like(routes_P).index_copy(0, rows_of(batch, wanted[mesh.data_rank]), dealt)


def advantages(
    learner: Learner, batch: ScoredBatch, group_N: Tensor, own: OwnAdvantage | None = None
) -> EstimatedBatch:
    """Return `estimate` of the batch, with the usual deviation that the learner remembers."""
    return estimate(batch, learner.config.algorithm, group_N, own, learner.usual_deviation)


def update(
    learner: Learner, batch: EstimatedBatch, iteration: int, hold: bool = False, own: OwnLoss | None = None
) -> tuple[dict[str, float], StepRatios | None, UpdatedBatch]:
    """Make one step of the actor, and update.critic_steps of the critic, for every minibatch of every epoch.

    Collective. Return the mean of the steps' metrics, the ratios of the last epoch, and the batch with old
    log-probs. Metrics and ratios are equal on every rank. The ratios of a minibatch are computed before the
    step on it.
    If the batch has no old log-probs, they are those of the first step, which must be on all trajectories.

    iteration: the policy version that is updated.
    hold: the actor's steps are computed and reported, but its weights do not change. This is for a batch
    whose rewards carry no signal. In the first update.critic_only iterations they are always held.
    own: algorithm.loss.
    If the batch of any rank has a number that is not finite, the whole batch is skipped, because whitening
    would spread that number over all advantages. This counts as one skipped step of each model, and None is
    returned instead of ratios.
    """
    config, a, actor, critic = learner.config, learner.config.algorithm, learner.actor, learner.critic
    assert actor is not None
    hold = hold or iteration < config.update.critic_only
    if any_rank(bool(not_finite(batch))):
        batch = batch if batch.old_logprob_T is not None else _with_old(learner, batch)
        return _skipped(learner, *learner.trainers), None, UpdatedBatch.of(batch)
    head, packer = learner.head(actor.model), learner.packer
    valued = with_observations(batch) if a.gae_observations else batch  # the critic's batch
    ratios, distinct = Ratios(batch, a), list[tuple[float, float]]()
    steps, acting = list[dict[str, float]](), list[dict[str, float]]()
    count = config.update.epochs * config.update.minibatches
    for epoch in batch.epochs:
        packer.keep(epoch)
        for minibatch in epoch:
            loss = ActorLoss(batch, minibatch_weights(batch, minibatch.chosen, a), a, head, own)
            step = actor_step(actor, loss, minibatch, packer, hold, len(steps), count)
            if batch.old_logprob_T is None:
                whole = len(minibatch.chosen) == len(batch.live_N)
                assert whole, "the policy has changed for the other trajectories"
                batch = replace(batch, old_logprob_T=step.ratios.logprob_T)
                if any_rank(bool(not_finite(batch))):  # the actor's step was skipped for it
                    return (
                        _skipped(learner, *(learner.trainers.keys() - {"actor"})),
                        None,
                        UpdatedBatch.of(batch),
                    )
            ratios.add(step.ratios)
            distinct.append(step.distinct)
            of_critic = [
                critic_step(critic, valued, minibatch, a.value_clip, packer)
                for _ in range(config.update.critic_steps)
                if critic
            ]
            steps.append(step.metrics | mean_of(of_critic))
            acting.append(step.acting)
    packer.keep(())
    if a.correction_probe and learner.mesh.rank == 0:
        write_steps(config.run.folder / "steps.jsonl", iteration + 1, steps)
    # not 0 only if scoring and update compute different log-probs, or with algorithm.old_policy=behaviour
    measured = {"actor/first_kl_to_old": steps[0]["actor/kl_to_old"], "actor/kl_after": 0.0}
    computed, packed = map(sum, zip(*distinct, strict=True))
    measured["update/distinct_share"] = computed / packed if packed else 1.0
    if any(row["actor/effective_lr"] for row in steps):  # a step was applied
        assert ratios.first is not None
        measured["actor/kl_after"] = after = kl_after(learner, batch, ratios.first)
        actor.memory = replace(actor.memory, kl_after=after)
        if batch.deviation > 0:
            actor.memory = actor.memory.with_deviation(batch.deviation)
    updated = UpdatedBatch.of(batch)
    agreement = current_mismatch(batch, *_at_start(updated, ratios, config.old_logprob_source), iteration)
    return mean_of(steps) | mean_of(acting) | ratios.row() | measured | agreement, ratios.last, updated


def _at_start(batch: UpdatedBatch, ratios: Ratios, source: str) -> tuple[Tensor, Tensor]:
    """Return (logprob_T, known_T): log-probs of the trainer's policy at the iteration's start, and for which
    tokens they are known: for those of the first step if the old log-probs are not the trainer's."""
    assert ratios.first is not None
    if source == "behaviour":
        return ratios.first.logprob_T, ratios.first.chosen_T
    return batch.old_logprob_T, torch.ones_like(batch.live_T)


def _skipped(learner: Learner, *roles: str) -> dict[str, float]:
    """Count a skipped step of these models. Return the metrics of an update without steps."""
    learner.packer.keep(())
    for role in roles:
        learner.trainers[role].skipped += 1
    return dict.fromkeys((f"{role}/skipped" for role in learner.trainers), 1.0)


def kl_after(learner: Learner, batch: DividedBatch, first: StepRatios) -> float:
    """Return an estimate of KL(policy before the update, policy after it), nats per token. Collective.

    The steps measure the policy before them, so that none of them measures what the last one did.

    It takes one forward pass over an eighth of the trajectories of the first step, at least eight and one per
    data-parallel rank. Every rank takes those that it has trained on, so other numbers of data-parallel ranks
    take others. The estimate is capped_kl, 0 without tokens that carry loss.
    first: the ratios of the first step, before which the policy is that of before the update.
    """
    actor, step = learner.actor, batch.epochs[0][0]
    assert actor is not None
    sample = step.first(math.ceil(max(LEAST, len(step.chosen) // PART) / learner.mesh.data_size))
    after_T = logprobs(actor.model, learner.head(actor.model), batch, learner.packer, [sample])
    in_T = first.live_T & chosen_tokens(batch, sample.chosen)
    return capped_kl(after_T, first.logprob_T, in_T)
