"""Checks that two steps of the run's optimizer are those of AdamW, computed here in float64.

Compared are sampled numbers of every tensor that the optimizer holds: all of it, or, with the distributed
optimizer, this rank's share. The gradients are those that the optimizer gets. The global norm is computed
here from all of them, each counted once, and so are the learning rate and the tensors with weight decay.

Learning rate, decay, epsilon and the bound of the norm are replaced by larger or smaller ones, so that each
has an effect above the rounding of a weight: with epsilon near the size of a gradient, the step depends on
the gradient's scale, and the norm is twice its bound. A warm-up and a decay of 0 stay as configured. The
steps are scaled as a correction or algorithm.rate does: the gradient before it is clipped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.bench.stage import Checked, Stage, judged, of_every_rank, plain
from megatron_stppo.evidence.bench.trial import Counted, Trial, random_batch
from megatron_stppo.evidence.checks.gradient import roles
from megatron_stppo.model import build
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import forward_backward
from megatron_stppo.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_names import ModelShape

OPTIMIZER = "the optimizer is AdamW"
SCALES = ((2.0, 1.0), (0.25, 0.5))  # of each step: those of the gradient and of the rate
SAMPLED = 2048  # numbers of each tensor
RATE, DECAY = 1e-2, 10.0  # learning rate of the first step; weight decay, if there is one
BOUND, EPSILON = 0.5, 0.3  # of the first norm: the bound; of the bounded gradient's root mean square: epsilon
SHARE, ROUNDINGS = 1e-3, 4.0  # allowed: of a tensor's largest step, and roundings of a weight in float32
REMEDY = "update.{}: these settings are not applied as documented; report them with this line"


@dataclass
class OptimizerTensor:
    """A tensor of the optimizer, and the rows of the model's parameter that it is the float32 copy of."""

    name: str
    parameter: Tensor  # of the model
    master: Tensor
    first: int  # number of the parameter where the copy begins
    copies: float  # ranks that hold the same numbers
    decays: bool
    at: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # sampled numbers
    want: Tensor = field(default_factory=lambda: torch.zeros(0))  # float64, what they must be
    mean: Tensor = field(default_factory=lambda: torch.zeros(0))  # of the gradients
    square: Tensor = field(default_factory=lambda: torch.zeros(0))

    def begin(self) -> None:
        """Choose the sampled numbers. The largest gradient is among them."""
        total, flat = self.master.numel(), gradient_of(self.master).flatten()
        every = max(1, total // SAMPLED)  # integers: torch.linspace rounds numbers above 2^24
        self.at = torch.cat([torch.arange(0, total, every, device=flat.device), flat.abs().argmax()[None]])
        self.want = self.now
        self.mean, self.square = torch.zeros_like(self.want), torch.zeros_like(self.want)

    @property
    def now(self) -> Tensor:
        return self.master.detach().flatten()[self.at].double()

    def step(self, number: int, rate: float, factor: float, epsilon: float, trainer: Trainer) -> None:
        """Take step `number`, from 1. factor: of the gradient."""
        g = gradient_of(self.master).flatten()[self.at].double() * factor
        beta1, beta2 = trainer.settings.betas
        self.mean = beta1 * self.mean + (1 - beta1) * g
        self.square = beta2 * self.square + (1 - beta2) * g**2
        size = (self.square / (1 - beta2**number)).sqrt() + epsilon
        decay = trainer.settings.weight_decay if self.decays else 0.0
        decayed = self.want * (1 - rate * decay)
        self.want = decayed - rate * self.mean / (1 - beta1**number) / size


def gradient_of(master: Tensor) -> Tensor:
    """Return the gradient that the optimizer has for a tensor; 0 without one."""
    gradient: Tensor | None = master.grad
    return torch.zeros_like(master) if gradient is None else gradient


def adam(stage: Stage) -> Iterator[Checked]:
    """Compare two steps of actor and critic with AdamW in float64. Collective."""
    for role in roles(stage.config):
        yield compared(role, stage.config, stage.learner.shape, stage.learner.mesh)


def compared(role: build.Role, config: Config, shape: ModelShape, mesh: MeshRank) -> Checked:
    """Return the line of one model, which is built for this. Collective."""
    batch = random_batch(shape.vocab, mesh.data_size, config.run.seed)
    settings = config.update.optimizer(role)
    updates = config.run.iterations * config.update.epochs * config.update.minibatches
    updates *= config.update.critic_steps if role == "critic" else 1
    warmup = max(1, math.ceil(settings.warmup_fraction * updates))
    decay = DECAY if settings.weight_decay else 0.0
    visible = {"lr": RATE * warmup, "weight_decay": decay, "grad_clip": 1e30}
    algorithm = plain(config.algorithm).changed(routing_replay="off")
    config = config.changed(update={role: visible}, algorithm=algorithm)
    trial = Trial.of(role, config, shape, mesh, process.dtype(config))
    trainer, counted = trial.trainer, Counted.of(trial)
    held, problems = tensors(trainer, counted), list[str]()
    missing = _missing(held, counted)
    if abs(missing) > 0.5:
        problems.append(f"{missing:,.0f} of the numbers that are trained are not the optimizer's")
    bound = epsilon = 0.0
    for number, (scale, of_rate) in enumerate(SCALES, 1):
        _compute(trial, batch)
        norm, own = trainer.reduce(), norm_of(held)
        if not abs(norm - own) <= SHARE * own:
            problems.append(f"the norm that clips is {norm:.6g}, that of all gradients {own:.6g}")
        if number == 1:
            bound = BOUND * own
            epsilon = _begin(trainer, held, bound)
        start = [tensor.want.clone() for tensor in held]
        rate = RATE * min(warmup, number) * of_rate
        factor = min(scale, bound / own)  # first scaled, then clipped
        for tensor in held:
            tensor.step(number, rate, factor, epsilon, trainer)
        trainer.step(norm, scale, of_rate)
        problems += _differences(held, start, number)
    problems += _unequal(counted, mesh)
    every = of_every_rank(problems)
    measured = f"{len(SCALES)} steps of {len(counted.parameters):,} tensors, bound {BOUND:g} x norm"
    text = "; ".join([measured, *every[:3]]) + f"; {len(every) - 3} more" * (len(every) > 3)
    return judged(f"{OPTIMIZER}: {role}", not every, text, REMEDY.format(role))


def _begin(trainer: Trainer, held: Sequence[OptimizerTensor], bound: float) -> float:
    """Set the bound of the norm and epsilon, which is returned, and choose the numbers that are compared."""
    total = float(all_reduce_sum(torch.tensor(sum(tensor.master.numel() / tensor.copies for tensor in held))))
    trainer.settings, epsilon = trainer.settings.changed(grad_clip=bound), EPSILON * bound / total**0.5
    for group in trainer.optimizer.param_groups:
        group["eps"] = epsilon
    for tensor in held:
        tensor.begin()
    return epsilon


def tensors(trainer: Trainer, counted: Counted) -> list[OptimizerTensor]:
    """Return the tensors that the optimizer has on this rank."""
    names = {id(parameter): name for name, parameter in counted.parameters.items()}
    held = []
    for wrapped in trainer.optimizer.chained_optimizers:
        share = wrapped.data_parallel_group.size() if isinstance(wrapped, DistributedOptimizer) else 1
        for parameter, master, first in _pairs(wrapped):
            name = names.get(id(parameter))
            if name is not None:
                copies, decays = counted.copies_of_parameter(name) / share, parameter.dim() > 1
                held.append(OptimizerTensor(name, parameter, master, first, copies, decays))
    return held


def _pairs(wrapped: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (the model's parameter, the optimizer's, where it begins) of one of megatron's optimizers."""
    if isinstance(wrapped, DistributedOptimizer):
        models = chain(*wrapped.model_float16_groups, *wrapped.model_fp32_groups)
        masters = chain(*wrapped.shard_fp32_from_float16_groups, *wrapped.shard_fp32_groups)
        for model, master in zip(models, masters, strict=True):
            yield model, master, wrapped._get_model_param_range_map(model)["param"].start
    elif isinstance(wrapped, Float16OptimizerWithFloat16Params):
        models = chain(*wrapped.float16_groups, *wrapped.fp32_from_fp32_groups)
        masters = chain(*wrapped.fp32_from_float16_groups, *wrapped.fp32_from_fp32_groups)
        yield from ((*pair, 0) for pair in zip(models, masters, strict=True))
    else:
        yield from ((x, x, 0) for group in wrapped.optimizer.param_groups for x in group["params"])


def _compute(trial: Trial, batch: EstimatedBatch) -> None:
    """Compute the gradient of a step, up to its reduction."""
    every, of_policy = trial.packer.whole(batch), EstimatedBatch.of(batch, old_logprob_T=None)
    loss: Any = trial.value_loss if trial.role == "critic" else trial.actor_loss
    trial.trainer.zero()
    packed = trial.packer.pack(batch, every)
    forward_backward(trial.trainer.model, packed, loss(of_policy, every))


def norm_of(held: Sequence[OptimizerTensor]) -> float:
    """Return the norm of the gradients of all ranks, each number counted once. Collective."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in held:
        total += float(gradient_of(tensor.master).double().square().sum()) / tensor.copies
    return float(all_reduce_sum(total)) ** 0.5


def _missing(held: Sequence[OptimizerTensor], counted: Counted) -> float:
    """Return how many of the numbers that are trained the optimizer of no rank holds. Collective."""
    wanted = sum(p.numel() / counted.copies_of_parameter(name) for name, p in counted.parameters.items())
    there = sum(tensor.master.numel() / tensor.copies for tensor in held)
    return float(all_reduce_sum(torch.tensor(wanted - there, dtype=torch.float64)))


def _differences(held: Sequence[OptimizerTensor], start: Sequence[Tensor], number: int) -> Iterator[str]:
    """Yield what differs on this rank after step `number`."""
    for tensor, before in zip(held, start, strict=True):
        step, apart = (tensor.want - before).abs().max(), (tensor.now - tensor.want).abs()
        allowed = SHARE * step + ROUNDINGS * torch.finfo(torch.float32).eps * tensor.want.abs()
        if not bool((apart <= allowed).all()):
            share = float(apart.max() / step.clamp(min=1e-30))
            yield f"{tensor.name}: step {number} differs by {share:.2g} of the step"
        rows = tensor.parameter.detach().flatten()[tensor.first : tensor.first + tensor.master.numel()]
        if not torch.equal(rows, tensor.master.detach().flatten().to(rows.dtype)):
            yield f"{tensor.name}: the model's weights are not those of the optimizer"


def _unequal(counted: Counted, mesh: MeshRank) -> list[str]:
    """Return the parameters that differ between data-parallel ranks. Collective."""
    names = [name for name in counted.parameters if ".experts." not in name]
    sums = torch.stack([counted.parameters[name].detach().double().sum() for name in names])
    apart = all_reduce_max(sums, mesh.token_group) + all_reduce_max(-sums, mesh.token_group)
    return [
        f"{name}: data-parallel ranks differ" for name, far in zip(names, apart.tolist(), strict=True) if far
    ]
