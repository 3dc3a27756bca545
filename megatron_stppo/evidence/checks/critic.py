"""Checks the critic: its loss is that of docs/algorithms.md, and no value depends on the token that it
judges.

The value head begins at zero, so both use a random one. Old values and returns are random numbers near the
values, on both sides of the clipping range, and the loss and its derivative are computed here in float64.
For the second check, the last action token of each trajectory is replaced by another one: the values of all
action tokens, read before the token is generated, must stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch, Minibatch, ScoredBatch, Trajectory
from megatron_stppo.cluster.launch import process
from megatron_stppo.evidence.bench import defined_loss
from megatron_stppo.evidence.bench.scoring import judges_single
from megatron_stppo.evidence.bench.stage import Checked, Stage, first_wrong, judged, of_every_rank, steady
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel.collectives import all_reduce_sum
from megatron_stppo.training.advantage import with_observations
from megatron_stppo.training.stages import distribute, score, update
from megatron_stppo.training.update.critic_step import value_loss

FORMULA, CAUSAL = "the critic's loss is the formula", "values do not see what they judge"
SHARE = 1e-3  # of the largest number: allowed difference of loss and derivative
# A value has moved if it has by this share of the values' deviation: rounding of other experts is far below.
MOVED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
CHANCE = 0.2  # share of the trajectories that may move where rounding can choose other experts


def critic(stage: Stage) -> Iterator[Checked]:
    """Score and update with a random value head, without steps, and compare. Collective."""
    if stage.learner.critic is None:
        yield from (Checked(check, "skipped", "there is no critic") for check in (CAUSAL, FORMULA))
        return
    algorithm = steady(stage.config.algorithm).changed(routing_replay="off")
    config = stage.config.changed(algorithm=algorithm, update={"epochs": 1, "critic_steps": 1})
    learner = replace(stage.learner, config=config)
    stage.rollouts.load_for("score")
    with _still(stage.learner.critic, learner.mesh.is_last_stage):
        scored = score(learner, distribute(learner, stage.played, 0))
        others = [_last_changed(t, learner.shape.vocab) for t in stage.played.own]
        other = score(learner, distribute(learner, replace(stage.played, own=others), 0))
        assert scored.value_T is not None and other.value_T is not None
        yield _causal(stage, scored, other.value_T)
        stage.rollouts.load_for("update")
        yield _formula(learner, scored)


@contextmanager
def _still(critic: Trainer, has_head: bool) -> Iterator[None]:
    """Context in which the critic has a random value head and takes no step. has_head: on this rank."""
    draw = torch.Generator().manual_seed(0)
    weight = critic.chunks[-1].output_layer.weight if has_head else torch.zeros(0)
    before = weight.detach().clone()
    weight.data.copy_(torch.randn(weight.shape, generator=draw) / max(1, weight.numel()) ** 0.5)
    critic.step = lambda *a, **k: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        del critic.step  # that of the instance
        weight.data.copy_(before)


def _last_changed(trajectory: Trajectory, vocab: int) -> Trajectory:
    if not trajectory.turns:  # its environment failed
        return trajectory
    *turns, last = trajectory.turns
    *ids, token = last.token_ids
    return replace(trajectory, turns=(*turns, replace(last, token_ids=(*ids, (token + 1) % vocab))))


def _causal(stage: Stage, scored: ScoredBatch, other_T: Tensor) -> Checked:
    """Return whether the values stay. other_T: those with other last tokens."""
    value_T = scored.value_T
    assert value_T is not None
    limit = MOVED[process.dtype(stage.config)] * float(value_T.std())
    if not limit > 0:
        return Checked(CAUSAL, "skipped", "all values are equal, also with a random head")
    apart = (other_T - value_T).abs().split(scored.action_offsets.diff().tolist())
    moved = sum(bool((apart_T > limit).any()) for apart_T in apart)
    allowed = 0.0 if judges_single(stage.learner) else CHANCE * len(apart)
    text = (
        f"with other last tokens, values of {moved} of {len(apart)} trajectories move by {limit:.1g} or more"
    )
    return judged(
        CAUSAL,
        moved <= allowed,
        text,
        "model.layers, megatron: the value of a token must be read where the token is predicted",
    )


def _formula(learner: Learner, scored: ScoredBatch) -> Checked:
    """Compare loss and derivative of the steps of an update with float64. Collective."""
    a, draw = learner.config.algorithm, torch.Generator().manual_seed(1)
    axis, value = ("R", scored.value_R) if a.gae_observations else ("T", scored.value_T)
    assert value is not None
    spread = 2 * min(a.value_clip, 1.0)  # old values and returns are on both sides of the clipping range
    old, target = (value + spread * torch.randn(value.shape, generator=draw) for _ in range(2))
    advantage_T = torch.randn(scored.live_T.shape, generator=draw).masked_fill(~scored.live_T, 0)
    planted: dict[str, Any] = {f"value_{axis}": old, f"return_{axis}": target}
    batch = EstimatedBatch.of(scored, advantage_T=advantage_T, **planted)
    valued = with_observations(batch) if a.gae_observations else batch
    columns = zip(value.tolist(), old.tolist(), target.tolist(), strict=True)
    errors = [defined_loss.value_error(*numbers, a.value_clip) for numbers in columns]
    losses, wrong, ends = list[float](), list[str](), valued.action_offsets.tolist()
    for number, minibatch in enumerate(batch.epochs[0], 1):
        own = {t for n in minibatch.chosen for t in range(ends[n], ends[n + 1]) if valued.live_T[t]}
        of_step = [errors[t] if t in own else (0.0, 0.0) for t in range(len(errors))]
        losses.append(sum(error for error, _ in of_step) / max(1, len(own)))
        slopes = [slope / max(1, len(own)) for _, slope in of_step]
        found = _slopes(learner, valued, minibatch, value)
        wrong += first_wrong(f"dL/dV of minibatch {number}", found, slopes, SHARE * max(map(abs, slopes)))
    row, _, _ = update(learner, batch, 0, hold=True)
    measured, loss = row.get("critic/loss", math.nan), fmean(losses)
    if not abs(measured - loss) <= SHARE * loss:
        wrong.append(f"critic/loss is {measured:.6g}, must be {loss:.6g}")
    every = of_every_rank(wrong)
    return judged(
        FORMULA,
        not every,
        "; ".join(every[:2]) or f"{len(value):,} tokens, critic/loss {measured:.6f} (float64: {loss:.6f})",
        "algorithm.value_clip: report this line; the loss is not that of docs/algorithms.md",
    )


def _slopes(learner: Learner, valued: EstimatedBatch, minibatch: Minibatch, value: Tensor) -> list[float]:
    """Return the derivative of the loss of a step by each value. Collective."""
    of_step = value_loss(valued, minibatch.chosen, learner.config.algorithm.value_clip)
    slope_T = torch.zeros_like(value)
    for microbatch in learner.packer.pack(valued, minibatch):
        value_T = value[microbatch.rows_T].requires_grad_()
        loss, _ = of_step(value_T, microbatch)
        slope_T[microbatch.rows_T] += torch.autograd.grad(loss, value_T)[0]
    return all_reduce_sum(slope_T, learner.mesh.token_group).tolist()
