"""Comparison of the same step under different layouts: every case is compared with the first one.

`check-layouts` computes it under every layout that fits the ranks, `verify` under a few of them
(checks/layouts.py).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import UpdatedBatch
from megatron_stppo.checkpoint.convert import gather
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.bench.trial import BLOCK, Trial, random_batch
from megatron_stppo.evidence.layouts.cases import Case, cases
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.pipeline import logprobs
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.training.update.actor_step import actor_step
from megatron_stppo.training.update.critic_step import critic_step
from megatron_stppo.training.update.own import Own
from megatron_stppo.weights.sharding.hf_names import Head, ModelShape, hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import by_file
from megatron_stppo.weights.sharding.low_rank import adapter_shapes
from megatron_stppo.weights.sharding.spans import training_spans

# Adam's first step, lr g / (|g| + eps), is nearly lr times the sign of g, which does not change if a gradient
# is wrongly summed twice. With eps far above |g| the step is g times lr / eps. lr is so large that the step
# is well above the rounding of a weight. Nothing else changes a weight: no decay and no clipping by norm.
OPTIMIZER = {"lr": 1e9, "warmup_fraction": 0.0, "weight_decay": 0.0, "grad_clip": 1e9}
EPSILON = 1e3
NUMBERS = (
    "actor/objective",
    "actor/entropy",
    "actor/kl_loss",
    "actor/clip_fraction",
    "actor/clipping_bias",
    "actor/correction_scale",
    "actor/gradient_norm",
    "critic/loss",
    "critic/gradient_norm",
)


@dataclass(frozen=True)
class Measured:
    """The result of a step.

    `after` are the weights by role and Hugging Face name, on rank 0, and `moved` the norms of their changes
    in the step; empty on other ranks. `moved` is also empty in all cases but the first.
    """

    numbers: dict[str, float]  # the values of NUMBERS, by name
    logprob_T: Tensor  # float32 [T], before the step
    moved: dict[str, float]
    after: dict[str, Tensor]


# The largest allowed differences between a case and the first one: of a log-prob in nats, of each of NUMBERS
# relative to it, and per tensor the norm of the difference / norm of the tensor's change in the step.
# Another layout adds in another order: tensors of a small model differ by 1e-6 in float32 and by 0.02 in
# bfloat16. A gradient that is wrongly summed twice, or not summed, gives a difference of at least 0.5.
TOLERANCES = {
    torch.float32: {"logprob": 5e-5, "number": 2e-4, "weights": 1e-3},
    torch.bfloat16: {"logprob": 0.2, "number": 0.1, "weights": 0.3},
}


@dataclass(frozen=True)
class Compared:
    """A case beside the first one."""

    case: str
    numbers: dict[str, float]  # the values of NUMBERS
    apart: dict[str, float]  # differences of "logprob", of numbers, and of "weights" on the first rank
    tensor: str | None  # the one with the largest difference of weights
    broken: list[str]  # differences above their limits

    def named(self, form: str) -> str:
        """Return what differs. form: how weights are named. Example: "actor/objective, weights (A)"."""
        return ", ".join(form.format(self.tensor) if name == "weights" else name for name in self.broken)

    def line(self) -> str:
        """Return the largest differences in one line, and the verdict."""
        largest = {
            "log-prob": self.apart["logprob"],
            "numbers": max(self.apart[name] for name in NUMBERS),
            "weights": self.apart["weights"],
        }
        numbers = "".join(f"{f'{name} {value:.1e}':20}" for name, value in largest.items())
        return f"{self.case:39} {numbers}" + (
            f"differs: {self.named('weights ({})')}" if self.broken else "same"
        )


def check_layouts(config: Config, output: Path | None = None) -> int:
    """Return the number of cases that differ from the first one. Collective.

    The batch is random and small. The algorithm and the model are those of the configuration. The first case
    is the layout of the configuration. `output`: a JSON file for all measurements. Raises ConfigError. The
    default process group exists already; its mesh is that of the last case afterwards.
    """
    shape, world, rank = read_shape(config.model.path), dist.get_world_size(), dist.get_rank()
    tolerance, rows = TOLERANCES[process.dtype(config)], list[Compared]()
    for row in compared(config, shape, partial(cases, shape, world, config.parallel)):
        rows.append(row)
        if rank == 0:
            print(row.line(), flush=True)
    broken = broadcast_record(sum(bool(row.broken) for row in rows), int, source=0)
    if rank == 0:
        print(
            f"{len(rows)} cases, {broken} differ. Allowed: log-probs {tolerance['logprob']:g} nats, numbers "
            f"{tolerance['number']:g} relative, weights {tolerance['weights']:g} of the change of a tensor."
        )
        if output is not None:
            about = {"dtype": str(process.dtype(config)), "ranks": world, "tolerance": tolerance}
            measured = about | {"cases": [asdict(row) for row in rows]}
            output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return broken


def compared(
    config: Config, shape: ModelShape, cases_of: Callable[[list[int]], list[Case]]
) -> Iterator[Compared]:
    """Yield each case beside the first one; the first rank has the weights. Collective.

    cases_of: returns the cases for sizes of micro-batches: a few trajectories, one, and all.
    """
    world, tolerance = dist.get_world_size(), TOLERANCES[process.dtype(config)]
    batch = random_batch(shape.vocab, world, config.run.seed)
    longest = int(batch.sequence_offsets.diff().max())
    first: Measured | None = None
    for case in cases_of([longest, 1, batch.tokens]):
        measured = measure(case, config, shape, batch, None if first is None else first.logprob_T)
        first = first or measured
        yield compare_case(case.name(world), measured, first, tolerance)


def compare_case(name: str, measured: Measured, first: Measured, limits: dict[str, float]) -> Compared:
    """Return the differences of a case from the first case, and those above their limits."""
    apart = {"logprob": float((measured.logprob_T - first.logprob_T).abs().max())}
    apart |= {
        number: abs(value - first.numbers[number]) / max(abs(first.numbers[number]), 1e-12)
        for number, value in measured.numbers.items()
    }
    tensor = None
    if measured.after:
        tensors = _weights_apart(measured, first)
        tensor = max(tensors, key=lambda key: tensors[key])
        apart["weights"] = tensors[tensor]
    allowed = {what: limits.get(what, limits["number"]) for what in apart}
    broken = [what for what, size in apart.items() if not size <= allowed[what]]  # NaN too
    return Compared(name, measured.numbers, apart, tensor, broken)


def _weights_apart(measured: Measured, first: Measured) -> dict[str, float]:
    """Return the relative difference of each tensor's weights after the step.

    It is the norm of the difference between both cases, divided by the norm of the change in the first case.
    A tensor that the step does not change in either case, such as an expert without tokens, has a difference
    of 0.
    """
    apart = {}
    for name, after in first.after.items():
        value = _distance(measured.after[name], after) / max(first.moved[name], 1e-12)
        apart[name] = math.inf if math.isnan(value) else value  # so that max() finds a NaN
    return apart


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a - b, in float64."""
    blocks = zip(a.flatten().split(BLOCK), b.flatten().split(BLOCK), strict=True)
    return math.hypot(*(float((x.double() - y.double()).norm()) for x, y in blocks))


def measure(
    case: Case, config: Config, shape: ModelShape, batch: UpdatedBatch, own_T: Tensor | None
) -> Measured:
    """Run one step of actor and critic under the layout of `case`, and return the result. Collective.

    own_T [T]: the log-probs to which the offsets of `batch` are added; None: those of this case.
    """
    config = config.changed(parallel=case.parallel, update={"actor": OPTIMIZER, "critic": OPTIMIZER})
    mesh, dtype = groups.replace(case.parallel, config.timeout), process.dtype(config)
    actor = Trial.of("actor", config, shape, mesh, dtype)
    critic = Trial.of("critic", config, shape, mesh, dtype, actor.trainer.chunks)
    for trial in (actor, critic):
        for group in trial.trainer.optimizer.param_groups:
            group["eps"] = EPSILON
    packer = actor.packer
    shares = packer.spec.share_prefixes and not case.apart
    packer = replace(packer, spec=replace(packer.spec, budget=case.budget, share_prefixes=shares))
    minibatch = packer.divide(batch, range(len(batch.live_N))[:: -1 if case.reverse else 1])
    logprob_T = logprobs(actor.trainer.model, actor.head, batch, packer, [minibatch])
    policy_T = logprob_T if own_T is None else own_T
    # The engine's log-probs are the policy's: the ratios of the train/serve mismatch are exp(offset), on both
    # sides of 1.
    batch = replace(batch, old_logprob_T=policy_T + batch.old_logprob_T, rollout_logprob_T=policy_T)
    before = _weights(actor) | _weights(critic) if own_T is None else {}
    loss = replace(actor.actor_loss(batch, minibatch), own=Own.of(config).loss)
    numbers = actor_step(actor.trainer, loss, minibatch, packer).metrics
    numbers |= critic_step(critic.trainer, batch, minibatch, config.algorithm.value_clip, packer)
    after = _weights(actor) | _weights(critic)
    moved = {name: _distance(after[name], weight) for name, weight in before.items()}
    return Measured({name: numbers[name] for name in NUMBERS}, logprob_T, moved, after)


def _weights(trial: Trial) -> dict[str, Tensor]:
    """Return the trained weights by role and Hugging Face name, on the host of rank 0.

    With adapters these are every A and B, without the scalar head of a critic.
    """
    config, shape, mesh = trial.config, trial.shape, trial.mesh
    lora, spec, source = config.model.lora, layer_spec(config), build.named_parameters(trial.trainer.chunks)
    head: Head = "value" if trial.role == "critic" else "vocabulary"
    shapes: Mapping[str, tuple[int, ...]] = hf_shapes(shape, head)
    at_once = [*by_file(shape, shapes, next(iter(source.values())).dtype).values()]
    if lora.rank:
        shapes = adapter_shapes(shape, lora.rank, lora.names)
        at_once = [[*shapes]]
    layouts = {
        rank: build.adapters_of_rank(shape, config, mesh.layout, rank)
        if lora.rank
        else training_spans(shape, mesh.layout, rank, spec=spec, head=head)
        for rank in range(mesh.world)
    }
    gathered = (gather(source, layouts, shape, shapes, keys) for keys in at_once)
    return {f"{trial.role} {name}": tensor for part in gathered for name, tensor in part.items()}
