"""The training loop: one line per stage, in the paper's order.

rollout  ->  score  ->  advantage  ->  update  ->  reshard  ->  (rollout)

Row k of metrics.jsonl is iteration k: rollouts written by policy version k - 1, and evaluate/* of version k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_stppo.advantage.estimate import estimate
from megatron_stppo.assemble import Parts, assemble, rollout_settings
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.data.packing import to_batch
from megatron_stppo.describe import describe, mean_of
from megatron_stppo.evaluate import held_out
from megatron_stppo.model import checkpoint
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.model.routing import recording
from megatron_stppo.reshard.verify import ReshardError
from megatron_stppo.runtime import launch
from megatron_stppo.runtime.faults import DoNotRestart
from megatron_stppo.runtime.metrics import Metrics, peak_gib, progress
from megatron_stppo.runtime.trajectory_log import TrajectoryLog
from megatron_stppo.score.logprobs import logprobs
from megatron_stppo.score.values import values
from megatron_stppo.types import Batch
from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.update.critic_step import critic_step
from megatron_stppo.update.minibatches import minibatches


def train(config: Config, resume: bool = True) -> None:
    """Runs to run.iterations, from the newest checkpoint if there is one and `resume`. Collective."""
    run = config.run
    cursor = tasks.TaskCursor(tasks.read(config.data.train), run.seed)
    parts = assemble(config)
    saver = checkpoint.Saver(run.folder / "checkpoints", config, parts.place.layout)
    first = _restore(parts, saver, cursor) if resume else 0
    rank, sampling = parts.place.rank, rollout_settings(config)
    launch.log_to(run.folder, rank)
    metrics = Metrics(run.folder, rank, first if first else None)
    log = TrajectoryLog(run.folder, rank, parts.engine.tokenizer)
    parts.serve(version=first)
    if run.evaluate_every and first == 0:
        metrics.log(0, held_out(parts))

    for iteration in progress(range(first, run.iterations), f"{config.algorithm.preset}", rank == 0):
        # rollout: multi-turn episodes against the environment
        with metrics.phase("rollout"):
            drawn = cursor.take(config.rollout.tasks_per_iteration)
            played = parts.play(drawn, config.rollout.samples_per_task, sampling, _seed(run.seed, iteration))
        # score: what actor, reference and critic say about the action tokens
        with metrics.phase("score"):
            parts.train("score")
            batch = _score(parts, to_batch(played), iteration)
        # advantage: credit to action tokens
        with metrics.phase("advantage"):
            batch = estimate(batch, config.algorithm, torch.tensor([t.group for t in played]))
        # update: ST-PPO on actor and critic
        with metrics.phase("update"):
            parts.train("update")
            steps = list(_update(parts, batch, iteration))
        row = mean_of(steps) | describe(played, batch)
        row["actor/first_kl_to_old"] = steps[0]["actor/kl_to_old"]  # 0, or scores and updates differ
        row["rollout/tokens_per_second"] = row["rollout/action_tokens"] / metrics.seconds("rollout")
        row["memory/peak_gib"] = peak_gib()  # of rank 0
        _check(parts, row)
        # reshard: the engine takes over the actor's weights
        done = iteration + 1
        with metrics.phase("reshard"):
            parts.serve(version=done)
        if run.evaluate_every and (done % run.evaluate_every == 0 or done == run.iterations):
            with metrics.phase("evaluate"):
                row |= held_out(parts)
        log.write(done, played)
        metrics.log(done, row)
        # last, so that all it resumes after has been reported; its seconds count to the next row
        if done % run.checkpoint_every == 0 or done == run.iterations:
            with metrics.phase("checkpoint"):
                parts.train("checkpoint")
                saver.save(done, parts.trainers, {"iteration": done, "cursor": cursor.state()})
                parts.serve(version=done)
        saver.check()
    saver.finish()
    metrics.close()
    parts.close()


def _score(parts: Parts, batch: Batch, iteration: int) -> Batch:
    update, actor, reference = parts.config.update, parts.actor, parts.reference
    assert actor is not None
    first_epoch = minibatches(len(batch.live_N), update.minibatches, parts.config.run.seed, iteration, 0)
    given = (batch, parts.packer, first_epoch)
    with recording(actor.chunks) as record:
        old_logprob_T = logprobs(actor.model, _head(parts, actor.model), *given)
        routes_P = record.routes(len(batch.tokens_P)) if record else None
    return replace(
        batch,
        old_logprob_T=old_logprob_T,
        routes_P=routes_P,
        reference_logprob_T=logprobs(reference, _head(parts, reference), *given) if reference else None,
        value_T=values(parts.critic.model, *given) if parts.critic else None,
    )


def _head(parts: Parts, model: Sequence[torch.nn.Module]) -> PolicyHead:
    config = parts.config
    temperature, segments = config.rollout.temperature, config.algorithm.segments
    rows = config.update.logit_rows
    return PolicyHead.of(model, parts.place, parts.shape.vocab, temperature, segments, rows)


def _update(parts: Parts, batch: Batch, iteration: int) -> Iterator[dict[str, float]]:
    """Every minibatch of every epoch: one step of the actor, one of the critic."""
    config, a, actor = parts.config, parts.config.algorithm, parts.actor
    assert actor is not None
    head = _head(parts, actor.model)
    for epoch in range(config.update.epochs):
        for chosen in minibatches(
            len(batch.live_N), config.update.minibatches, config.run.seed, iteration, epoch
        ):
            weight_T = minibatch_weights(batch, chosen, a)
            loss = ActorLoss(batch, weight_T, a, head)
            step = actor_step(actor, loss, chosen, parts.packer)
            if parts.critic is not None:
                step |= critic_step(parts.critic, batch, chosen, a.value_clip, parts.packer)
            yield step


def _restore(parts: Parts, saver: checkpoint.Saver, cursor: tasks.TaskCursor) -> int:
    """The iteration to go on from: 0 without a checkpoint."""
    state = saver.load(parts.trainers)
    if state is None:
        return 0
    if "cursor" in state:  # a converted model has none
        cursor.restore(state["cursor"])
    return int(state["iteration"])


def _check(parts: Parts, row: dict[str, Any]) -> None:
    """Ends the run where going on would only waste devices. Equal on all ranks, because the row is."""
    skipped, budget = sum(t.skipped for t in parts.trainers.values()), parts.config.run.nonfinite_budget
    if skipped > budget:
        raise DoNotRestart(f"{skipped} steps were not finite, run.nonfinite_budget={budget}; lower the rates")
    difference, limit = row["mismatch/mean_abs"], parts.config.rollout.max_mismatch
    if not difference <= limit:  # NaN too
        raise ReshardError(
            f"engine and trainer disagree by {difference:.3g} nats per token, rollout.max_mismatch={limit}; "
            "the engine does not serve the trainer's weights, or in another precision"
        )


def _seed(seed: int, iteration: int) -> int:
    return seed * 1_000_003 + iteration
