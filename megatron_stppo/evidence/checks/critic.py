"""Checks the critic: it begins with the weights of its folder, its values are its hidden states times the
whole head, its steps are those of docs/algorithms.md, and no value depends on the token that it judges.

The value head begins at zero, so all use a random one. Old values and returns are random numbers near the
values, on both sides of the clipping range, and the loss and its derivative are computed here in float64.
For the last one, the last action token of each trajectory is replaced by another one: the values of all
action tokens, read before the token is generated, must stay. With algorithm.gae_observations, values are also
those of the same tokens if observations are parts of the actions.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch, Minibatch, ScoredBatch, Trajectory, Turn
from megatron_stppo.cluster.launch import process
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.evidence.bench import defined_loss
from megatron_stppo.evidence.bench.distributions import apart
from megatron_stppo.evidence.bench.scoring import judges_single
from megatron_stppo.evidence.bench.stage import (
    Checked,
    Stage,
    faultless,
    judged,
    of_every_rank,
    replaced,
    steady,
)
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import gather
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel.collectives import all_reduce_sum
from megatron_stppo.training.advantage import with_observations
from megatron_stppo.training.stages import distribute, score, update
from megatron_stppo.training.update.critic_step import value_loss
from megatron_stppo.weights.sharding.hf_checkpoint import load_hf
from megatron_stppo.weights.sharding.hf_files import head_of_critic
from megatron_stppo.weights.sharding.hf_names import Head, ModelShape
from megatron_stppo.weights.sharding.spans import training_spans

BEGINS, FORMULA = "the critic begins as configured", "the critic's loss is the formula"
READ = "values are read by the whole head"
CAUSAL, OBSERVED = "values do not see what they judge", "observations have values of their own"
SHARE = 1e-3  # of the largest number: allowed difference of loss and derivative
# A value has moved if it has by this share of the values' deviation: rounding of other experts is far below.
MOVED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
CHANCE = 0.2  # share of the trajectories that may move where rounding can choose other experts


def critic(stage: Stage) -> Iterator[Checked]:
    """Score and update with a random value head, without steps, and compare. Collective."""
    if stage.learner.critic is None:
        none = (BEGINS, READ, CAUSAL, FORMULA)
        yield from (Checked(check, "skipped", "there is no critic") for check in none)
        return
    algorithm = steady(stage.config.algorithm).changed(routing_replay="off")
    config = stage.config.changed(algorithm=algorithm, update={"epochs": 1})
    learner = replace(stage.learner, config=config)
    yield begins(learner)
    with _still(stage.learner.critic, learner.mesh.is_last_stage) as steps:
        scored, whole = _scored(learner, stage.learner.critic, stage.played)
        yield whole
        others = [_last_changed(t, learner.shape.vocab) for t in stage.played.own]
        other = score(learner, distribute(learner, replace(stage.played, own=others), 0))
        assert scored.value_T is not None and other.value_T is not None
        ends = scored.action_offsets
        yield _same(stage, CAUSAL, scored.value_T, other.value_T, ends, "with other last tokens")
        if algorithm.gae_observations:
            yield _observed(stage, learner, scored)
        stage.rollouts.load_for("update")
        yield _formula(learner, scored, steps)


def begins(learner: Learner) -> Checked:
    """Return whether the critic has the weights of its folder. Collective."""
    model, critic = learner.config.model, learner.critic
    if model.lora.rank or critic is None:
        return Checked(BEGINS, "skipped", "with adapters it has the actor's weights")
    folder = model.path if model.critic_path is None else model.critic_path
    remedy, head = "model.critic_path: report this line", head_of_critic(folder)
    return judged(BEGINS, *of_folder(learner, critic.chunks, folder, learner.shape, head), remedy)


def of_folder(
    learner: Learner, chunks: Sequence[TokenModel], folder: Path, shape: ModelShape, head: Head = "vocabulary"
) -> tuple[bool, str]:
    """Return whether a model without adapters has the weights of a folder, and what was found. Collective."""
    own, mesh, parameters = list[str](), learner.mesh, build.named_parameters(chunks)
    layers = layer_spec(learner.config)
    spans = training_spans(shape, mesh.layout, mesh.rank, spec=layers, head=head, tied_copy=True)
    for name, parameter in parameters.items():
        needed = torch.zeros_like(parameter)  # a value head that the folder lacks
        if name in spans:
            load_hf(folder, shape, {name: spans[name]}, {name: needed})
        own += [] if torch.equal(needed, parameter) else [name]
    wrong = of_every_rank(own)
    text = f"{len(wrong)} tensors, as {wrong[0]}, are not" if wrong else f"{len(parameters)} tensors are"
    return not wrong, f"{text} those of {folder}"


@contextmanager
def _still(critic: Trainer, has_head: bool) -> Iterator[Iterator[int]]:
    """Context in which the critic has a random value head, and its steps are only counted. has_head: on this
    rank."""
    draw, steps = torch.Generator().manual_seed(0), count()
    weights = list(critic.chunks[-1].output_layer.parameters()) if has_head else []
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.copy_(torch.randn(weight.shape, generator=draw) / weight.numel() ** 0.5)
    try:
        with replaced(critic, "step", lambda *a, **k: next(steps) >= 0):
            yield steps
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)


def _scored(learner: Learner, critic: Trainer, played: Played) -> tuple[ScoredBatch, Checked]:
    """Return the scored episodes, and whether values are hidden states times the head. Collective."""
    packed, exact, mesh, chunk = list[Microbatch](), list[Tensor](), learner.mesh, critic.chunks[-1]
    real = chunk._head

    def head(hidden: Tensor, microbatch: Microbatch) -> Tensor:
        whole, (weight, bias) = hidden, (x.double() for x in chunk.output_layer.parameters())
        if chunk.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(whole, group=mesh.tensor_group)
        packed.append(microbatch)
        exact.append((whole[microbatch.hidden_index_T, 0].double() @ weight[0] + bias).float())
        return real(hidden, microbatch)

    with replaced(chunk, "_head", head):
        scored = score(learner, distribute(learner, played, 0))
    value = scored.value_T if scored.value_R is None else scored.value_R
    assert value is not None
    wrong = apart("value", value, gather(packed, exact, len(value), mesh), SHARE)
    text = f"{len(value):,} tokens, hidden states times the head in float64"
    remedy = "model.layers, megatron: report this line; the value head is wrong"
    return scored, faultless(READ, wrong, text, remedy)


def _last_changed(trajectory: Trajectory, vocab: int) -> Trajectory:
    if not trajectory.turns:  # its environment failed
        return trajectory
    *turns, last = trajectory.turns
    *ids, token = last.token_ids
    return replace(trajectory, turns=(*turns, replace(last, token_ids=(*ids, (token + 1) % vocab))))


def _observed(stage: Stage, learner: Learner, scored: ScoredBatch) -> Checked:
    """Return whether values are those of a critic to which observations are parts of actions. Collective."""

    def joined(turn: Turn) -> Turn:
        ids = turn.token_ids + turn.observation_ids
        return Turn(ids, (0.0,) * len(ids), (), turn.reward, ((0, len(ids)),))

    played = Played.of([replace(t, turns=tuple(map(joined, t.turns))) for t in stage.played.own])
    config = learner.config.changed(algorithm={"gae_observations": False})
    other = score(replace(learner, config=config), distribute(learner, played, 0))
    assert scored.value_T is not None and scored.value_R is not None and other.value_T is not None
    starts, lengths = other.turn_offsets.tolist(), scored.turn_offsets.diff().tolist()
    acted = [t for start, n in zip(starts, lengths, strict=False) for t in range(start, start + n)]
    needed = torch.cat([other.value_T, other.value_T[acted]])
    ends = torch.cat([other.action_offsets, scored.action_offsets[1:] + len(other.value_T)])
    found = torch.cat([scored.value_R, scored.value_T])
    return _same(stage, OBSERVED, found, needed, ends, "as parts of actions")


def _same(stage: Stage, check: str, own: Tensor, other: Tensor, offsets: Tensor, when: str) -> Checked:
    """Return whether two values of each token are the same, up to rounding. offsets: of trajectories."""
    limit = MOVED[process.dtype(stage.config)] * float(own.std())
    if not limit > 0:
        return Checked(check, "skipped", "all values are equal, also with a random head")
    apart = (other - own).abs().split(offsets.diff().tolist())
    moved = sum(bool((of_trajectory > limit).any()) for of_trajectory in apart)
    allowed = 0.0 if judges_single(stage.learner) else CHANCE * len(apart)
    text = f"{when}, values of {moved} of {len(apart)} trajectories move by {limit:.1g} or more"
    remedy = "model.layers, megatron: the value of a token must be read where the token is predicted"
    return judged(check, moved <= allowed, text, remedy)


def _formula(learner: Learner, scored: ScoredBatch, steps: Iterator[int]) -> Checked:
    """Compare loss and derivative of the steps of an update with float64, and their number. Collective."""
    a, draw = learner.config.algorithm, torch.Generator().manual_seed(1)
    axis, value = ("R", scored.value_R) if a.gae_observations else ("T", scored.value_T)
    assert value is not None
    spread = 2 * min(a.value_clip, 1.0)  # old values and returns are on both sides of the clipping range
    old, target = (value + spread * torch.randn(value.shape, generator=draw) for _ in range(2))
    advantage_T = torch.randn(scored.live_T.shape, generator=draw).masked_fill(~scored.live_T, 0)
    planted: dict[str, Any] = {f"value_{axis}": old, f"return_{axis}": target}
    batch = EstimatedBatch.of(scored, advantage_T=advantage_T, **planted)
    valued = with_observations(batch) if a.gae_observations else batch
    exact = value.double().requires_grad_()
    errors = defined_loss.value_error(exact, old.double(), target.double(), a.value_clip)
    losses, wrong, ends = list[float](), list[str](), valued.action_offsets.tolist()
    for number, minibatch in enumerate(batch.epochs[0], 1):
        own = [t for n in minibatch.chosen for t in range(ends[n], ends[n + 1]) if valued.live_T[t]]
        loss = errors[own].sum() / max(1, len(own))
        losses.append(loss.item())
        found = _slopes(learner, valued, minibatch, value)
        wrong += apart(f"dL/dV of minibatch {number}", found, defined_loss.slope(loss, exact), SHARE)
    row, _, _ = update(learner, batch, 0, hold=True)
    measured, mean = row.get("critic/loss", math.nan), fmean(losses)
    if not abs(measured - mean) <= SHARE * mean:
        wrong.append(f"critic/loss is {measured:.6g}, must be {mean:.6g}")
    done, due = next(steps), learner.config.update.critic_steps * len(batch.epochs[0])
    if done != due:
        wrong.append(f"{done} steps of the critic in an epoch, must be {due}")
    text = f"{len(value):,} tokens, critic/loss {measured:.6f} (float64: {mean:.6f})"
    remedy = "algorithm.value_clip, update.critic_steps: report this line; a step is not that of the docs"
    return faultless(FORMULA, of_every_rank(wrong), text, remedy, shown=2)


def _slopes(learner: Learner, valued: EstimatedBatch, minibatch: Minibatch, value: Tensor) -> Tensor:
    """Return the derivative of the loss of a step by each value. Collective."""
    of_step = value_loss(valued, minibatch.chosen, learner.config.algorithm.value_clip)
    slope_T = torch.zeros_like(value)
    for microbatch in learner.packer.pack(valued, minibatch):
        value_T = value[microbatch.rows_T].requires_grad_()
        loss, _ = of_step(value_T, microbatch)
        slope_T[microbatch.rows_T] += torch.autograd.grad(loss, value_T)[0]
    return all_reduce_sum(slope_T, learner.mesh.token_group)
