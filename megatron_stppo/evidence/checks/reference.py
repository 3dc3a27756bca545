"""Checks of what must not move: the log-probs before the first step, the reference, and learning rates."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import DividedBatch, EstimatedBatch, ScoredBatch, UpdatedBatch
from megatron_stppo.cluster.launch import connections
from megatron_stppo.config import ParallelConfig
from megatron_stppo.evidence.bench.stage import (
    Checked,
    Stage,
    faultless,
    judged,
    of_every_rank,
    replaced,
    steady,
)
from megatron_stppo.evidence.checks.critic import of_folder
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.training.stages import score, update
from megatron_stppo.training.update.actor_step import actor_step
from megatron_stppo.weights.sharding.hf_names import read_shape

FIRST, BEGINS = "the first ratio is 1", "the reference begins as the policy"
OTHER = "the reference is that of its folder"
STAYS, RATES = "the reference stays", "learning rates hold"
LARGE = 1e-4  # learning rate of the steps that must not move the reference
EPSILON = 1e-8  # of Adam
REMEDY = (
    "algorithm.kl_coefficient, model.reference_path: report this line; the KL penalty is to other weights"
)


def first_ratio(stage: Stage) -> Iterator[Checked]:
    """Score the episodes, and compute the steps of the first epoch without taking them. Collective."""
    config, actor = stage.config, stage.actor
    scoring = config.changed(update={"old_logprob": "score"}, algorithm={"old_policy": "score"})
    scored = score(replace(stage.learner, config=scoring), _unscored(stage))
    batch = UpdatedBatch.of(scored, advantage_T=stage.random_T(0))
    stage.rollouts.load_for("update")
    apart = list[Tensor]()
    for minibatch in batch.epochs[0]:
        step = actor_step(actor, stage.loss(batch, minibatch), minibatch, stage.learner.packer, hold=True)
        apart.append((step.ratios.logprob_T - batch.old_logprob_T)[step.ratios.chosen_T])
    yield _equal(FIRST, torch.cat(apart), suspects(config.parallel))


def _equal(check: str, apart_T: Tensor, remedy: str) -> Checked:
    largest = float(apart_T.abs().nan_to_num(torch.inf).max())
    text = f"{len(apart_T):,} tokens, largest difference of a log-prob {largest:.2g} (0 allowed)"
    return judged(check, largest == 0, text, remedy)


def suspects(parallel: ParallelConfig) -> str:
    """Return the settings to look at if scoring and update differ."""
    if torch.cuda.is_available() and parallel.tensor > 1 and os.environ.get(connections.NVLS) != "0":
        return f"{connections.NVLS}: with NVLS, sums of tensor parallel ranks change between calls; set 0"
    return (
        "update.tokens_per_microbatch, model.layers, megatron: scoring and update compute different "
        "log-probs; remove what differs, or is random, in training only"
    )


def reference(stage: Stage) -> Iterator[Checked]:
    """Compare the reference's log-probs with the policy's, and with those after large steps. Collective."""
    if stage.learner.reference is None:
        yield from (Checked(check, "skipped", "there is no reference") for check in (BEGINS, STAYS))
        return
    config, learner, rollouts, actor = stage.config, _actor_alone(stage), stage.rollouts, stage.actor
    policy_T, reference_T, scored = _logprobs(stage, learner)
    folder = config.model.reference_path
    if folder is not None:
        found = of_folder(learner, stage.learner.reference, folder, read_shape(folder))
        yield judged(OTHER, *found, REMEDY)
    elif config.replays_rollout:
        yield Checked(BEGINS, "skipped", "the policy has the engine's experts")
    else:
        yield _equal(BEGINS, policy_T - reference_T, REMEDY)
    rollouts.load_for("update")
    weights, settings = stage.weights(), actor.settings
    actor.settings = settings.changed(lr=LARGE * max(1, actor.warmup))
    update(learner, EstimatedBatch.of(scored, advantage_T=stage.random_T(0)), config.run.iterations)
    actor.settings = settings
    stage.publish()
    rollouts.load_for("score")
    policy_after_T, after_T, _ = _logprobs(stage, learner)
    rollouts.load_for("update")
    stage.set_weights(weights)
    actor.optimizer.reload_model_params()
    stage.publish()
    moved = float((policy_after_T - policy_T).abs().mean())
    if moved == 0:
        yield Checked(STAYS, "skipped", "the policy has not moved")
        return
    apart = float((after_T - reference_T).abs().nan_to_num(torch.inf).max())
    text = f"the policy has moved by {moved:.2g} nats, the reference by {apart:.2g} (0 allowed)"
    yield judged(STAYS, apart == 0, text, REMEDY)


def _actor_alone(stage: Stage) -> Learner:
    """Return the learner without a critic, with plain steps of an epoch and log-probs from scoring."""
    algorithm = steady(stage.config.algorithm).changed(old_policy="score")
    update = {"old_logprob": "score", "epochs": 1, "critic_only": 0}
    config = stage.config.changed(algorithm=algorithm, update=update)
    return replace(stage.learner, config=config, critic=None)


def _logprobs(stage: Stage, learner: Learner) -> tuple[Tensor, Tensor, ScoredBatch]:
    """Return the log-probs of policy and reference, and the scored batch. Collective."""
    batch = _unscored(stage)
    scored = score(learner, replace(batch, epochs=batch.epochs[:1]))
    assert scored.old_logprob_T is not None and scored.reference_logprob_T is not None
    return scored.old_logprob_T, scored.reference_logprob_T, scored


def _unscored(stage: Stage) -> DividedBatch:
    """Return the batch without the experts that scoring with routing_replay=old_policy has recorded."""
    return stage.batch if stage.config.replays_rollout else replace(stage.batch, routes_P=None)


def rates(stage: Stage) -> Iterator[Checked]:
    """Record what the optimizers would apply at six step numbers, and in a late update. Collective."""
    stage.rollouts.load_for("update")
    config, wrong, shown = stage.config, list[str](), list[str]()
    old_T = stage.batch.rollout_logprob_T.clone()
    batch = EstimatedBatch.of(stage.batch, old_logprob_T=old_T, advantage_T=stage.random_T(0))
    for role, trainer in stage.learner.trainers.items():
        section = config.update.optimizer(role)  # type: ignore[arg-type]
        total = config.run.iterations * config.update.epochs * config.update.minibatches
        total *= config.update.critic_steps if role == "critic" else 1
        warmup = math.ceil(section.warmup_fraction * total)
        with _recorded(trainer) as recorded:
            for trainer.updates in (0, 1, warmup // 2, warmup, total - 1, 3 * total):
                trainer.step(0.0)
            if role == "actor":
                update(_actor_alone(stage), batch, config.run.iterations)
        for number, group in recorded:
            rate = section.lr * min(1.0, (number + 1) / max(1, warmup))
            needed = {"lr": (rate,), "eps": (EPSILON,), "weight_decay": (0.0, section.weight_decay)}
            for name, values in (needed | {"betas": (section.betas,)}).items():
                if group[name] not in values:
                    wrong.append(f"{role}, step {number}: {name} is {group[name]}, not {values[-1]}")
        seen = [group["lr"] for _, group in recorded]
        shown.append(f"{role} {min(seen):.3g} to {max(seen):.3g}")
    text, remedy = f"at six step numbers: {', '.join(shown)}", "update.actor, update.critic: report this line"
    yield faultless(RATES, of_every_rank(wrong), text, f"{remedy}; they are not used", shown=3)


@contextmanager
def _recorded(trainer: Trainer) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Context in which steps change nothing but the gradients. Yield (step number, a group's settings)."""
    optimizer, before = trainer.optimizer, (trainer.updates, trainer.memory)
    recorded = list[tuple[int, dict[str, Any]]]()

    def record() -> None:
        recorded.extend((trainer.updates, dict(group)) for group in optimizer.param_groups)

    with replaced(optimizer, "step_with_ready_grads", record):
        yield recorded
    trainer.updates, trainer.memory = before
