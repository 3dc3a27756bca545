"""Checks what low-rank adapters add: alpha / rank * B A x, with alpha and rank of the configuration.

Every layer with an adapter gets the same random input twice: without its weight and with a random B, and with
alpha / rank * B A, computed in float64, as its weight and without the adapter.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.evidence.bench.distributions import ROUNDED, apart
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless, of_every_rank
from megatron_stppo.model import build
from megatron_stppo.model.adapters import adapters
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.weights.sharding.low_rank import A, B
from megatron_stppo.weights.sharding.spans import chunk_prefix
from megatron_stppo.weights.sharding.tiles import PADDING, Span

ADDED = "adapters add alpha / rank * B A"


def added(stage: Stage) -> Iterator[Checked]:
    """Compare the layers of actor and critic that have adapters. Collective."""
    if not stage.config.model.lora.rank or layer_spec(stage.config) == "transformer_engine":
        yield Checked(ADDED, "skipped", "there are none, or in layers that also normalise their input")
        return
    learner, wrong = stage.learner, list[str]()
    config, mesh = learner.config, learner.mesh
    spans = build.adapters_of_rank(learner.shape, config, mesh.layout, mesh.rank)
    lora, count = config.model.lora, 0
    for role, trainer in learner.trainers.items():
        for number, chunk in enumerate(trainer.chunks):
            for name, adapter in adapters(chunk):
                prefix = f"{chunk_prefix(len(trainer.chunks), number)}{name}"
                layer: Any = chunk.get_submodule(name.removesuffix(".adapter"))
                weights = (layer.weight.data, adapter.a.data, adapter.b.data)
                of_ab, factor = [spans[f"{prefix}.{m}"] for m in "ab"], lora.alpha / lora.rank
                own, needed = _outputs(layer, weights, of_ab, factor, mesh.tensor_size)
                wrong += apart(f"{role}, {name}", own, needed, ROUNDED[own.dtype])
                count += 1
    text = f"{count} layers on this rank, alpha {lora.alpha:g}, rank {lora.rank}"
    remedy = "model.lora.alpha, model.lora.rank: report this line"
    yield faultless(ADDED, of_every_rank(wrong), text, remedy)


@torch.no_grad()
def _outputs(
    layer: Any, weights: Sequence[Tensor], spans: Sequence[Sequence[Span]], factor: float, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return what a layer makes of random numbers with the adapter alone, and with factor * B A alone.

    weights: of the layer, A and B, restored afterwards. spans: of A and B. ranks: of the layer.
    """
    (weight, a, b), (of_a, of_b) = weights, spans
    draw, kept = torch.Generator().manual_seed(0), [weight.clone(), b.clone()]
    x = torch.randn(4 * ranks, 1, weight.shape[1], generator=draw).to(weight)
    random = torch.randn(b.shape, generator=draw).to(weight)
    weight.zero_()
    b.copy_(random)
    own = layer(x)[0]
    first = {span.hf_key.replace(A, B): span.local for span in of_a}
    for span in of_b:  # where the layer joins several, rows belong to the A of their own
        if span.hf_key != PADDING:
            rows = slice(span.local, span.local + span.size)
            at = first[span.hf_key] if of_a[0].dim == 0 else 0
            weight[rows] = (factor * b[rows].double() @ a[at : at + b.shape[1]].double()).to(weight)
    b.zero_()
    needed = layer(x)[0]
    for tensor, before in zip((weight, b), kept, strict=True):
        tensor.copy_(before)
    return own.flatten(), needed.flatten()
