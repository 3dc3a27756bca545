"""One step of actor and critic under one layout: what it reports, and the weights it leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.data.packing import to_batch
from megatron_stppo.invariance.cases import Case
from megatron_stppo.model import build
from megatron_stppo.model.hf_names import ModelShape, hf_shapes
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import Packer
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.model.spans import hf_spans, row_widths, training_layouts
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.groups import Place
from megatron_stppo.reshard.state import Resharder
from megatron_stppo.runtime import launch
from megatron_stppo.score.logprobs import logprobs
from megatron_stppo.types import Batch, Task, Trajectory, Turn
from megatron_stppo.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.update.critic_step import critic_step

# The rate is large enough for a step to stand out from the rounding of a weight, and nothing is clipped by
# norm, so that the weights show the gradient.
OPTIMIZER = {"lr": 1e-3, "warmup_fraction": 0.0, "grad_clip": 1e9}
NUMBERS = (
    "actor/objective",
    "actor/gradient_norm",
    "actor/clip_fraction",
    "critic/loss",
    "critic/gradient_norm",
)


@dataclass(frozen=True)
class Measured:
    """`before` and `after` are the actor's weights by Hugging Face name, on rank 0; elsewhere empty."""

    numbers: dict[str, float]  # NUMBERS
    logprob_T: Tensor  # float32 [T], before the step
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def random_batch(vocab: int, trajectories: int, seed: int) -> Batch:
    """Trajectories of 1 to 4 turns over random tokens, one failed; random advantages, values and returns.

    Its old_logprob_T is an offset, to be added to a policy's own: it moves ratios beyond both clip bounds.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    def turn() -> Turn:
        action = ids(number(1, 13))
        return Turn(action, (0.0,) * len(action), ids(number(0, 9)), 0.0, 0)

    task = Task("invariance", (), ("",), "train", 0)
    played = [
        Trajectory(task, ids(number(3, 17)), tuple(turn() for _ in range(number(1, 5))), "ok")
        for _ in range(trajectories)
    ]
    played[-1] = replace(played[-1], outcome="timeout")
    batch = to_batch(played)

    def normal_T(scale: float) -> Tensor:
        return torch.randn(len(batch.action_index_T), generator=generator) * scale

    return replace(
        batch,
        old_logprob_T=normal_T(0.5),
        reference_logprob_T=normal_T(0.5) - 5,
        advantage_T=normal_T(1.0),
        value_T=normal_T(0.3),
        return_T=normal_T(1.0),
    )


def measure(case: Case, config: Config, shape: ModelShape, batch: Batch, own_T: Tensor | None) -> Measured:
    """Collective. own_T [T]: log-probs that the offsets of `batch` are added to; None: this case's own."""
    sections = {
        role: getattr(config.update, role).model_copy(update=OPTIMIZER) for role in ("actor", "critic")
    }
    update = config.update.model_copy(update=sections)
    config = config.model_copy(update={"parallel": case.parallel, "update": update})
    place, dtype, a = groups.replace(case.parallel), launch.dtype(config), config.algorithm
    actor, critic = (build.trainer(role, shape, config, place, dtype) for role in ("actor", "critic"))
    if place.is_last_stage:  # at its initial zero the head would leave the trunk without a gradient
        weight = critic.chunks[-1].output_layer.weight
        weight.data.copy_(0.2 * torch.cos(torch.arange(shape.hidden, device=weight.device))[None])
    packer = Packer.of(config, shape, place)
    packer = replace(packer, cut=replace(packer.cut, budget=case.budget))
    head = PolicyHead.of(actor.model, place, shape.vocab, segments=a.segments, chunk=config.update.logit_rows)
    chosen = list(range(len(batch.live_N)))[:: -1 if case.reverse else 1]
    logprob_T = logprobs(actor.model, head, batch, packer, [chosen])
    assert batch.old_logprob_T is not None
    given = replace(batch, old_logprob_T=batch.old_logprob_T + (logprob_T if own_T is None else own_T))
    before = _whole(actor, shape, config, place) if own_T is None else {}
    numbers = actor_step(
        actor, ActorLoss(given, minibatch_weights(given, chosen, a), a, head), chosen, packer
    )
    numbers |= critic_step(critic, given, chosen, a.value_clip, packer)
    after = _whole(actor, shape, config, place)
    return Measured({name: numbers[name] for name in NUMBERS}, logprob_T, before, after)


def _whole(actor: Trainer, shape: ModelShape, config: Config, place: Place) -> dict[str, Tensor]:
    """The actor's weights by Hugging Face name, gathered on rank 0."""
    source = build.named_parameters(actor.chunks)
    dtype = next(iter(source.values())).dtype
    sizes = hf_shapes(shape).items() if place.rank == 0 else ()
    target = {key: torch.empty(size, dtype=dtype) for key, size in sizes}
    layouts = training_layouts(shape, place.layout, spec=layer_spec(config))
    Resharder(source, target, layouts, {0: hf_spans(shape)}, row_widths(shape)).sync(0)
    return target
