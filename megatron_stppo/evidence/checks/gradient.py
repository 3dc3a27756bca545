"""Checks that the gradient is the derivative of the objective: for every part of actor and critic.

The objective is the value that a step reports, computed by forward passes with changed weights. A part's
weights move along the part's gradient g, where the derivative must be |g|, and along a random direction u,
where it must be <g, u>. A part that by mistake has no gradient still changes the objective along u.

The models are built in float32: in bfloat16, 4 of the 34 slopes of a real model were resolved, one of them
wrongly (SmolLM2, H200, 2026-11-28). TransformerEngine's attention has no float32, so there is no check with
it. Slopes that finite differences do not resolve are counted as not judged.

Terms of the loss that need other models are off, and so is algorithm.loss: other losses than the clipped
surrogate stop gradients by definition. Without algorithm.routing_replay, every pass chooses the experts anew.

With u the direction and w+ = round(w + h u), w- = round(w - h u) in float32, the central difference
is D = (f(w+) - f(w-)) / 2h, and the gradient's value E = <g, w+ - w-> / 2h. So the rounding of weights is in
both. D - E = c h^2 + noise / h for a right gradient. It is computed for steps h that are each a quarter of
the step before, and extrapolated to h = 0 (Richardson). The larger difference
between three steps estimates its error. The steps are small, because objectives with clipping have kinks, and
every kink between w- and w+ adds to the difference. A step may not change the objective by more than CHANGE
of its scale, going by the gradient: far away everything is clipped, and the objective is flat.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import UpdatedBatch
from megatron_stppo.config import Config
from megatron_stppo.evidence.bench.stage import Checked, Stage, steady
from megatron_stppo.evidence.bench.trial import Counted, Piece, Trial, main_gradient, random_batch
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.pipeline import forward_backward, logprobs, total
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.update.actor_step import SUMS, actor_step
from megatron_stppo.training.update.critic_step import critic_step
from megatron_stppo.weights.sharding.hf_names import ModelShape

Tensors = Sequence[Tensor]
STEPS = 6  # at most
FACTOR = 4  # between two steps
# Largest allowed difference of the slopes, relative to the larger one, besides the estimated errors.
SHARE, ERRORS = 0.02, 3.0
COARSE = 0.3  # a slope with a larger tolerance, relative to itself, is not judged
FIRST = 4e-3  # norm of the first step / norm of the part's weights
CHANGE = 0.1  # of the objective by the first step, relative to its scale
NOISE = 1e-7  # of f, relative to its scale


@dataclass(frozen=True)
class Slope:
    """The derivative of f along a direction.

    Example: Slope(2.0, 2.001, 0.003): finite differences say 2.001 +- 0.003, the gradient says 2.
    """

    gradient: float
    measured: float
    error: float  # estimated, of `measured`
    where: str = ""  # such as "actor, attention, first layer"
    along: str = "gradient"  # or "random"

    def __str__(self) -> str:
        direction = "its gradient" if self.along == "gradient" else "a random direction"
        measured = f"{self.measured:.4g} +- {self.error:.1g}"
        return f"{self.where}: slope along {direction} {measured}, by the gradient {self.gradient:.4g}"

    @property
    def size(self) -> float:
        return max(abs(self.gradient), abs(self.measured))

    @property
    def tolerance(self) -> float:
        return SHARE * self.size + ERRORS * self.error

    @property
    def judged(self) -> bool:
        """Whether the finite differences are accurate enough, or f does not change at all."""
        return self.size == 0 or self.tolerance <= COARSE * self.size

    @property
    def holds(self) -> bool:
        return not self.judged or self.used <= 1

    @property
    def used(self) -> float:
        """The difference, in tolerances."""
        difference = abs(self.measured - self.gradient)
        return difference / self.tolerance if difference else 0.0


@dataclass(frozen=True)
class Direction:
    """The weights w + h u of some pieces of a model."""

    counted: Counted
    pieces: Sequence[Piece]
    u: Tensors  # of each piece, of any length
    gradient: Tensors  # g of each piece

    def slope(self, f: Callable[[], float], scale: float) -> Slope:
        """Return the derivative of f along u / |u|. Collective; the weights are as before afterwards.

        scale: that of f, for the largest step and for the least error by rounding.
        """
        weights = self.counted.views(self.pieces, lambda parameter: parameter.detach())
        before = [weight.clone() for weight in weights]
        along = self.counted.dot(self.pieces, self.u, self.u) ** 0.5
        size = self.counted.dot(self.pieces, before, before) ** 0.5
        slope = abs(self.counted.dot(self.pieces, self.gradient, self.u)) / along
        step = min(FIRST * (size or 1.0), CHANGE * scale / slope if slope else math.inf)
        estimates, apart = list[Slope](), list[float]()
        for number in range(STEPS):
            measured, gradient = self._difference(f, step, along, weights, before)
            apart.append(measured - gradient)
            if number > 1:
                first, second, third = apart[-3:]
                better = third + (third - second) / (FACTOR**2 - 1)
                noise = NOISE * scale / step
                error = max(abs(first - second), abs(second - third), noise)
                estimates.append(Slope(gradient, gradient + better, error))
                if ERRORS * error <= SHARE * estimates[-1].size / 2:
                    break
            step /= FACTOR
        return min(estimates, key=lambda slope: slope.error / slope.size if slope.size else 0.0)

    def _difference(
        self, f: Callable[[], float], step: float, along: float, weights: Tensors, before: Tensors
    ) -> tuple[float, float]:
        """Return D and E of one step. along: |u|."""
        values, moved = [], list[list[Tensor]]()
        for sign in (1, -1):
            for weight, old, u in zip(weights, before, self.u, strict=True):
                torch.add(old, u, alpha=sign * step / along, out=weight)
            moved.append([weight.clone() for weight in weights])
            values.append(f())
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        change = [up.sub_(down) for up, down in zip(*moved, strict=True)]
        by_gradient = self.counted.dot(self.pieces, self.gradient, change)
        return (values[0] - values[1]) / (2 * step), by_gradient / (2 * step)


GRADIENT = "the gradient is right"
# A step with this learning rate changes no weight, and the gradients after it are those of the loss.
STILL = {"lr": 0.0, "weight_decay": 0.0, "grad_clip": 1e30, "distributed": False}
NO_FLOAT32 = "finite differences need float32, which TransformerEngine's attention lacks; model.layers=local"
LEAST = 0.3  # share of the slopes along gradients that must be judged
REMEDY = (
    "model.layers, model.recompute, megatron, parallel: find the field with which this part's gradient is "
    "right, and report the other value with this line"
)


def gradient(stage: Stage) -> Iterator[Checked]:
    """Compare the gradients of actor and critic with finite differences. Collective."""
    for role in roles(stage.config):
        if layer_spec(stage.config) == "transformer_engine":
            yield Checked(f"{GRADIENT}: {role}", "skipped", NO_FLOAT32)
            continue
        yield finding(role, slopes(role, stage.config, stage.learner.shape, stage.learner.mesh))


def roles(config: Config) -> tuple[build.Role, ...]:
    """Return the models that the configuration trains."""
    return ("actor", "critic") if config.needs_critic else ("actor",)


def finding(role: build.Role, slopes: list[Slope]) -> Checked:
    """Return the line of one model."""
    check, resolved = f"{GRADIENT}: {role}", [slope for slope in slopes if slope.judged]
    along, every = (Counter(slope.along for slope in of) for of in (resolved, slopes))
    counts = (
        f"judged {along['gradient']} of {every['gradient']} slopes along gradients, {along['random']} of "
        f"{every['random']} along random directions"
    )
    if bare := [slope.where for slope in slopes if slope.along == "gradient" and not slope.size]:
        return Checked(check, "fails", f"no gradient: {'; '.join(bare)}", REMEDY)
    if wrong := [slope for slope in resolved if not slope.holds]:
        worst = max(wrong, key=lambda slope: slope.used)
        return Checked(check, "fails", f"{len(wrong)} of {len(resolved)} slopes differ; {worst}", REMEDY)
    if not every["gradient"] or along["gradient"] < LEAST * every["gradient"]:
        return Checked(check, "skipped", f"finite differences are too coarse: {counts}")
    largest = max(slope.used for slope in resolved)
    return Checked(check, "ok", f"{counts}; largest difference {largest:.2g} of what is allowed")


def slopes(role: build.Role, config: Config, shape: ModelShape, mesh: MeshRank) -> list[Slope]:
    """Return the slopes of all parts of a model, which is built for this. Collective."""
    batch = random_batch(shape.vocab, mesh.data_size, config.run.seed)
    half = batch.tokens // (2 * mesh.data_size) + 1  # two micro-batches on each rank
    algorithm = steady(config.algorithm).changed(routing_replay="off")
    still = {"actor": STILL, "critic": STILL, "tokens_per_microbatch": half}
    config = config.changed(algorithm=algorithm, update=still)
    trial = Trial.of(role, config, shape, mesh, torch.float32)
    f, scale = _objective(trial, batch)
    counted, every = Counted.of(trial), list[Slope]()
    for number, part in enumerate(counted.parts):
        pieces = counted.pieces(part)
        g = [x.clone() for x in counted.views(pieces, main_gradient)]
        directions = {"gradient": g, "random": list(counted.random(pieces, number))}
        for along, direction in directions.items():
            if along == "random" or counted.dot(pieces, g, g) > 0:
                slope = Direction(counted, pieces, direction, g).slope(f, scale)
            elif part.startswith("experts"):  # they may have no token
                continue
            else:
                slope = Slope(0.0, 0.0, 0.0)
            every.append(replace(slope, where=f"{role}, {part}", along=along))
    return every


@torch.no_grad()
def _objective(trial: Trial, batch: UpdatedBatch) -> tuple[Callable[[], float], float]:
    """Compute the gradient by a step. Return the loss as a function of the model's weights, and its scale."""
    trainer, packer, is_critic = trial.trainer, trial.packer, trial.role == "critic"
    every = packer.whole(batch)
    packed = packer.pack(batch, every)
    loss: Any
    step: Callable[[], object]
    if is_critic:
        loss, scale = trial.value_loss(batch, every), 1.0
        step = partial(critic_step, trainer, batch, every, trial.config.algorithm.value_clip, packer)
    else:
        own_T = logprobs(trainer.model, trial.head, batch, packer, [every])
        loss = trial.actor_loss(replace(batch, old_logprob_T=own_T + batch.old_logprob_T), every)
        scale = float((loss.weight_T * batch.advantage_T).abs().sum())
        step = partial(actor_step, trainer, loss, every, packer, hold=True)
    with torch.enable_grad():
        step()

    def f() -> float:
        records: Any = forward_backward(trainer.model, packed, loss, trains=False)
        if is_critic:
            return float(total(records, 1, trial.mesh))
        return -float(total([record.sums for record in records], len(SUMS), trial.mesh)[0])

    return f, scale
