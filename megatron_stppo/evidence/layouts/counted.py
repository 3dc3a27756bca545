"""The tensors of a model that are trained, on this rank, such that sums over ranks count each number once.

Which numbers a rank holds follows from the spans (weights/sharding/spans.py), not from attributes that
megatron sets: a number that several ranks hold is counted with one divided by the number of these ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel.collectives import all_reduce_sum
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import EMBEDDING, HEAD, VALUE, VALUE_BIAS, ModelShape
from megatron_stppo.weights.sharding.low_rank import A, B
from megatron_stppo.weights.sharding.spans import training_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans

Piece = tuple[str, Span]  # a parameter's name and one of its spans
NAMED = {EMBEDDING: "embedding", HEAD: "head", VALUE: "value head", VALUE_BIAS: "value head"}


@dataclass(frozen=True)
class Counted:
    """The tensors of one model that the configuration trains, whether or not they have a gradient."""

    parameters: dict[str, torch.nn.Parameter]  # of this rank
    layouts: dict[int, Spans]  # of every rank
    rank: int
    shape: ModelShape

    @classmethod
    def of(
        cls, role: build.Role, trainer: Trainer, config: Config, shape: ModelShape, mesh: MeshRank
    ) -> Counted:
        layouts = {rank: _trained_spans(role, config, shape, mesh.layout, rank) for rank in range(mesh.world)}
        every = build.named_parameters(trainer.chunks)
        return cls({name: every[name] for name in layouts[mesh.rank]}, layouts, mesh.rank, shape)

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
        for (_, span), one, other in zip(pieces, first, second, strict=True):
            total += float((one.double() * other.double()).sum()) / self.copies_of(span)
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


def _trained_spans(role: build.Role, config: Config, shape: ModelShape, layout: Layout, rank: int) -> Spans:
    """Return the spans of the parameters of a rank that the configuration trains."""
    is_critic = role == "critic"
    spans = training_spans(
        shape,
        layout,
        rank,
        spec=layer_spec(config),
        head="value" if is_critic else "vocabulary",
        tied_copy=True,
    )
    if config.model.lora.rank:
        heads = {n: of for n, of in spans.items() if of[0].hf_key in (VALUE, VALUE_BIAS)}
        return {**heads, **build.adapters_of_rank(shape, config, layout, rank)}
    frozen = is_critic and config.update.critic.frozen_attention
    return {name: of for name, of in spans.items() if not (frozen and ".self_attention." in name)}
