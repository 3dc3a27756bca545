"""A model that is built to be measured, and a batch for it: of `check-layouts`, and of checks of `verify`.

`Counted` has the tensors that are trained, such that sums over ranks count each number once. Which numbers a
rank holds follows from the spans (weights/sharding/spans.py), not from attributes that megatron sets: a
number that several ranks hold is counted with one divided by the number of these ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch, Minibatch, Task, Trajectory, Turn, UpdatedBatch
from megatron_stppo.config import Config
from megatron_stppo.data.division import Packer
from megatron_stppo.data.packing import to_batch
from megatron_stppo.model import adapters, build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import packer_of
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel.collectives import all_reduce_sum
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.update.actor_step import ActorLoss, minibatch_weights
from megatron_stppo.training.update.critic_step import value_loss
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD, VALUE, VALUE_BIAS, Head, ModelShape
from megatron_stppo.weights.sharding.low_rank import A, B, adapter_shapes, fill
from megatron_stppo.weights.sharding.spans import training_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans

Piece = tuple[str, Span]  # a parameter's name and one of its spans
BLOCK = 2**16  # numbers that are converted to float64 at once: they stay in a core's cache
NAMED = {EMBEDDING: "embedding", HEAD: "head", VALUE: "value head", VALUE_BIAS: "value head"}


def random_batch(vocab: int, ranks: int, seed: int) -> UpdatedBatch:
    """Return trajectories of 1 to 4 turns of random tokens, with random advantages, values and returns.

    There are eight, or two for each of more ranks.
    Every second one begins as the one before: with its prompt and first turn, or with its prompt alone. One
    of them failed. old_logprob_T is an offset to be added to a policy's own log-probs; it moves some ratios
    beyond both clip bounds.
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
        for _ in range(2 * max(4, ranks))
    ]
    for n in range(1, len(played), 2):
        own, before = played[n], played[n - 1]
        first = (before if n % 4 == 1 else own).turns[:1]
        played[n] = replace(own, prompt_ids=before.prompt_ids, turns=first + own.turns[1:])
    played[-1] = replace(played[-1], outcome="timeout")
    batch = to_batch(played)

    def normal_T(scale: float) -> Tensor:
        return torch.randn(len(batch.action_index_T), generator=generator) * scale

    return UpdatedBatch.of(
        batch,
        epochs=(),
        old_logprob_T=normal_T(0.5),
        reference_logprob_T=normal_T(0.5) - 5,
        advantage_T=normal_T(1.0),
        value_T=normal_T(0.3),
        return_T=normal_T(1.0),
    )


@dataclass(frozen=True)
class Trial:
    """An actor or a critic of which every trained tensor has a gradient."""

    role: build.Role
    config: Config
    shape: ModelShape
    mesh: MeshRank
    trainer: Trainer

    @classmethod
    def of(
        cls,
        role: build.Role,
        config: Config,
        shape: ModelShape,
        mesh: MeshRank,
        dtype: torch.dtype,
        trunk: Sequence[TokenModel] | None = None,
    ) -> Trial:
        """Build a model, and replace the initial zeros of a new B or value head. Collective.

        trunk: an actor's chunks, with whose frozen weights a critic is built that has adapters; None: it gets
        frozen weights of its own.
        """
        if role == "actor" or not config.model.lora.rank:
            trunk = None
        elif trunk is None:
            trunk = build.from_hf("actor", shape, config, mesh, dtype)
        trial = cls(role, config, shape, mesh, build.trainer(role, shape, config, mesh, dtype, trunk))
        set_b(trial.trainer.chunks, role, shape, config, mesh)
        if role == "critic" and mesh.is_last_stage:
            weight: Tensor = trial.trainer.chunks[-1].output_layer.weight
            weight.data.copy_(0.2 * torch.cos(torch.arange(shape.hidden, device=weight.device))[None])
        trial.trainer.optimizer.reload_model_params()  # the float32 copies of a bfloat16 model
        return trial

    @cached_property
    def packer(self) -> Packer:
        return packer_of(self.config, self.shape, self.mesh)

    @cached_property
    def head(self) -> PolicyHead:
        on_gpu = torch.cuda.is_available()
        return PolicyHead.configured(self.trainer.model, self.mesh, self.shape.vocab, self.config, on_gpu)

    def actor_loss(self, batch: EstimatedBatch, minibatch: Minibatch) -> ActorLoss:
        a = self.config.algorithm
        return ActorLoss(batch, minibatch_weights(batch, minibatch.chosen, a), a, self.head)

    def value_loss(self, batch: EstimatedBatch, minibatch: Minibatch) -> Any:
        return value_loss(batch, minibatch.chosen, self.config.algorithm.value_clip)


def set_b(model: Sequence[TokenModel], role: str, shape: ModelShape, config: Config, mesh: MeshRank) -> None:
    """Give every B of the adapters, if there are any, random values that are equal under every layout. With
    the initial zeros, A would have no gradient."""
    lora, parameters = config.model.lora, build.named_parameters(model)
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    for name, spans in build.adapters_of_rank(shape, config, mesh.layout, mesh.rank).items():
        if name.endswith(".b"):
            fill(parameters[name], spans, lambda key: 0.3 * adapters.uniform(shapes[key], f"{role} {key}"))


@dataclass(frozen=True)
class Counted:
    """The tensors of one model that the configuration trains, whether or not they have a gradient."""

    parameters: dict[str, torch.nn.Parameter]  # of this rank
    layouts: dict[int, Spans]  # of every rank
    rank: int
    shape: ModelShape

    @classmethod
    def of(cls, trial: Trial) -> Counted:
        mesh = trial.mesh
        layouts = {rank: _trained_spans(trial, rank) for rank in range(mesh.world)}
        every = build.named_parameters(trial.trainer.chunks)
        return cls({name: every[name] for name in layouts[mesh.rank]}, layouts, mesh.rank, trial.shape)

    @cached_property
    def copies(self) -> Counter[tuple[str, int, int]]:
        """The number of ranks that hold the rows of a span."""
        every = (s for layout in self.layouts.values() for spans in layout.values() for s in spans)
        return Counter((span.hf_key, span.start, span.size) for span in every)

    def copies_of(self, span: Span) -> int:
        return self.copies[span.hf_key, span.start, span.size]

    def copies_of_parameter(self, name: str) -> int:
        """Return the number of ranks that hold the same rows of every tensor of a parameter."""
        spans = self.layouts[self.rank][name]
        held = (span for span in spans if span.hf_key != PADDING)
        return self.copies_of(next(held, spans[0]))

    @cached_property
    def parts(self) -> list[str]:
        """The names of the parts of the whole model, equal on every rank."""
        every = (s for layout in self.layouts.values() for spans in layout.values() for s in spans)
        return sorted({self.part_of(span.hf_key) for span in every if span.hf_key != PADDING})

    def part_of(self, key: str) -> str:
        """Return the part that a tensor belongs to.

        Example: model.layers.0.mlp.up_proj.weight belongs to "MLP, first layer".
        """
        if key in NAMED:
            return NAMED[key]
        if key.endswith("norm.weight"):
            return "norms"
        layer, mlp = int(key.split(".")[2]), self.shape.mlp
        _, of_mixer, of_mlp = self.shape.prefixes(layer)
        if key == mlp.router_weight(of_mlp):
            return "routers"
        where = {0: "first layer", self.shape.layers - 1: "last layer"}.get(layer, "layers between")
        for matrix in (A, B):
            if f".{matrix}." in key:
                return f"{matrix}, {where}"
        kind = "attention" if key.startswith(of_mixer) else "experts" if self.shape.experts else "MLP"
        return f"{kind}, {where}"

    def pieces(self, part: str | None = None) -> list[Piece]:
        """Return this rank's pieces of a part, or all."""
        return [
            (name, span)
            for name, spans in self.layouts[self.rank].items()
            for span in spans
            if span.hf_key != PADDING and part in (None, self.part_of(span.hf_key))
        ]

    def views(self, pieces: Sequence[Piece], of: Callable[[torch.nn.Parameter], Tensor]) -> list[Tensor]:
        """Return the rows of each piece in of(parameter), which has the parameter's shape."""
        return [of(self.parameters[name]).narrow(s.dim, s.local, s.size) for name, s in pieces]

    def dot(self, pieces: Sequence[Piece], first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        """Return the inner product of two lists of tensors over all ranks, in float64. Collective."""
        total = torch.zeros((), dtype=torch.float64)
        for (_, span), a, b in zip(pieces, first, second, strict=True):
            blocks = zip(a.flatten().split(BLOCK), b.flatten().split(BLOCK), strict=True)
            total += float(sum(x.double() @ y.double() for x, y in blocks)) / self.copies_of(span)
        return float(all_reduce_sum(total))

    def random(self, pieces: Sequence[Piece], seed: int) -> Iterator[Tensor]:
        """Yield normal numbers for each piece: equal on all ranks that hold its rows."""
        for name, span in pieces:
            text = f"{seed} {span.hf_key} {span.start} {span.size}"
            number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
            weight = self.parameters[name].narrow(span.dim, span.local, span.size)
            generator = torch.Generator(device=weight.device).manual_seed(number)
            yield torch.randn(weight.shape, generator=generator, device=weight.device)


def main_gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Return the reduced gradient of a trainer without the distributed optimizer; 0 for a tensor that is not
    trained."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient


def _trained_spans(trial: Trial, rank: int) -> Spans:
    """Return the spans of the parameters of a rank that the configuration trains."""
    config, shape, layout, is_critic = trial.config, trial.shape, trial.mesh.layout, trial.role == "critic"
    head: Head = "value" if is_critic else "vocabulary"
    spans = training_spans(shape, layout, rank, spec=layer_spec(config), head=head, tied_copy=True)
    if config.model.lora.rank:
        heads = {n: of for n, of in spans.items() if of[0].hf_key in (VALUE, VALUE_BIAS)}
        return {**heads, **build.adapters_of_rank(shape, config, layout, rank)}
    frozen = is_critic and config.update.critic.frozen_attention
    return {name: of for name, of in spans.items() if not (frozen and ".self_attention." in name)}
