"""One step of actor and critic under one layout: the metrics that it reports and the weights after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch, Task, Trajectory, Turn
from megatron_stppo.checkpoint.convert import gather
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.layouts.cases import Case
from megatron_stppo.model import adapters, build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import logprobs, packer_of
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
from megatron_stppo.training.update.critic_step import critic_step
from megatron_stppo.training.update.own import Own
from megatron_stppo.weights.sharding.hf_names import Head, ModelShape, hf_shapes
from megatron_stppo.weights.sharding.hf_write import by_file
from megatron_stppo.weights.sharding.low_rank import adapter_shapes, fill
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

    `before` and `after` are the weights by role and Hugging Face name, on rank 0; empty on other ranks.
    `before` is also empty in all cases but the first.
    """

    numbers: dict[str, float]  # the values of NUMBERS, by name
    logprob_T: Tensor  # float32 [T], before the step
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def random_batch(vocab: int, trajectories: int, seed: int) -> Batch:
    """Return trajectories of 1 to 4 turns of random tokens, with random advantages, values and returns.

    Every second one begins as the one before: with its prompt and first turn, or with its prompt alone. One
    of them failed. old_logprob_T is an offset that `measure` adds to a policy's own log-probs; it moves
    some ratios beyond both clip bounds.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    def turn() -> Turn:
        action = ids(number(1, 13))
        return Turn(action, (0.0,) * len(action), ids(number(0, 9)), 0.0, ((0, len(action)),))

    task = Task("invariance", (), ("",), "train", 0)
    played = [
        Trajectory(task, ids(number(3, 17)), tuple(turn() for _ in range(number(1, 5))), "ok")
        for _ in range(trajectories)
    ]
    for n in range(1, trajectories, 2):
        one, before = played[n], played[n - 1]
        first = (before if n % 4 == 1 else one).turns[:1]
        played[n] = replace(one, prompt_ids=before.prompt_ids, turns=first + one.turns[1:])
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
    """Run one step of actor and critic under the layout of `case`, and return the result. Collective.

    own_T [T]: the log-probs to which the offsets of `batch` are added; None: those of this case.
    """
    sections = {
        role: getattr(config.update, role).model_copy(update=OPTIMIZER) for role in ("actor", "critic")
    }
    update = config.update.model_copy(update=sections)
    config = config.model_copy(update={"parallel": case.parallel, "update": update})
    mesh = groups.replace(case.parallel, config.timeout)
    actor = differentiable("actor", config, shape, mesh, process.dtype(config))
    critic = differentiable("critic", config, shape, mesh, process.dtype(config), actor.chunks)
    trainers: dict[build.Role, Trainer] = {"actor": actor, "critic": critic}
    for trainer in trainers.values():
        for group in trainer.optimizer.param_groups:
            group["eps"] = EPSILON
    packer = packer_of(config, shape, mesh)
    shares = packer.spec.share_prefixes and not case.apart
    packer = replace(packer, spec=replace(packer.spec, budget=case.budget, share_prefixes=shares))
    head = PolicyHead.configured(actor.model, mesh, shape.vocab, config, torch.cuda.is_available())
    chosen = range(len(batch.live_N))[:: -1 if case.reverse else 1]
    minibatch = packer.divide(batch, chosen)
    logprob_T = logprobs(actor.model, head, batch, packer, [minibatch])
    assert batch.old_logprob_T is not None
    policy_T = logprob_T if own_T is None else own_T
    # The engine's log-probs are the policy's: the ratios of the train/serve mismatch are exp(offset), on both
    # sides of 1.
    given = replace(batch, old_logprob_T=policy_T + batch.old_logprob_T, rollout_logprob_T=policy_T)
    before = _whole(trainers, shape, config, mesh) if own_T is None else {}
    a = config.algorithm
    loss = ActorLoss(given, minibatch_weights(given, chosen, a), a, head, Own.of(config).loss)
    numbers = actor_step(actor, loss, minibatch, packer).metrics
    numbers |= critic_step(critic, given, minibatch, a.value_clip, packer)
    after = _whole(trainers, shape, config, mesh)
    return Measured({name: numbers[name] for name in NUMBERS}, logprob_T, before, after)


def differentiable(
    role: build.Role,
    config: Config,
    shape: ModelShape,
    mesh: MeshRank,
    dtype: torch.dtype,
    actor: Sequence[TokenModel] | None = None,
) -> Trainer:
    """Return an actor or critic in which the initial zeros of a new B or value head are replaced: every
    trained tensor has a gradient. Collective.

    actor: its chunks, with whose frozen weights a critic is built that has adapters.
    """
    shared = actor if config.model.lora.rank else None
    trainer = build.trainer(role, shape, config, mesh, dtype, shared)
    set_b(trainer.chunks, role, shape, config, mesh)
    if role == "critic" and mesh.is_last_stage:
        weight: Tensor = trainer.chunks[-1].output_layer.weight
        weight.data.copy_(0.2 * torch.cos(torch.arange(shape.hidden, device=weight.device))[None])
    trainer.optimizer.reload_model_params()  # the float32 copies of a bfloat16 model
    return trainer


def set_b(model: Sequence[TokenModel], role: str, shape: ModelShape, config: Config, mesh: MeshRank) -> None:
    """Give every B of the adapters, if there are any, random values that are equal under every layout. With
    the initial zeros, A would have no gradient."""
    lora, parameters = config.model.lora, build.named_parameters(model)
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    for name, spans in build.adapters_of_rank(shape, config, mesh.layout, mesh.rank).items():
        if name.endswith(".b"):
            fill(parameters[name], spans, lambda key: 0.3 * adapters.uniform(shapes[key], f"{role} {key}"))


def _whole(
    trainers: Mapping[build.Role, Trainer], shape: ModelShape, config: Config, mesh: MeshRank
) -> dict[str, Tensor]:
    """Return the trained weights by role and Hugging Face name, on the host of rank 0.

    With adapters these are every A and B, without the scalar head of a critic.
    """
    lora, spec, found = config.model.lora, layer_spec(config), dict[str, Tensor]()
    for role, trainer in trainers.items():
        source = build.named_parameters(trainer.chunks)
        head: Head = "value" if role == "critic" else "vocabulary"
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
        for keys in at_once:
            gathered = gather(source, layouts, shape, shapes, keys)
            found |= {f"{role} {name}": tensor for name, tensor in gathered.items()}
    return found
