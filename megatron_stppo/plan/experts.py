"""Even routing of tokens to experts, for meta tensors, which have no values to route by.

megatron's dispatcher reads from the device how many tokens each expert receives. Here every expert receives
the same number. A run whose router prefers some experts takes more memory on their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
from torch import Tensor


def route_evenly(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the counts of the chunks' dispatchers even. The counts are on the host, all else is on meta."""
    for dispatcher in _dispatchers(chunks):
        dispatcher.preprocess = partial(_preprocess, dispatcher, dispatcher.preprocess)  # type: ignore[method-assign]


def _preprocess(self: Dispatcher, measured: Callable[[Tensor], Tensor], routing_map: Tensor) -> Tensor:
    measured(routing_map)
    ranks, local = self.tp_size * self.ep_size, slice(None, self.num_local_experts)
    sent = even(self.num_out_tokens, self.num_experts)
    mine = sent[local]  # from each rank; the experts of other ranks may get one more or less
    if ranks > 1:
        self.input_splits = sent.reshape(self.ep_size, -1).sum(1)
        self.output_splits = mine.sum().repeat(self.ep_size)
        self.output_splits_tp = self.output_splits.sum().repeat(self.tp_size)
    if self.num_local_experts > 1:
        self.num_global_tokens_per_local_expert = mine.repeat(ranks, 1)
    return mine * ranks


def forget(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop the last autograd graph that each dispatcher keeps.

    The graph is part of a reference cycle with the models, which Python's garbage collector does not find.
    """
    for dispatcher in _dispatchers(chunks):
        dispatcher.probs = None


def _dispatchers(chunks: Iterable[torch.nn.Module]) -> Iterator[Dispatcher]:
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer):
                yield layer.token_dispatcher


def even(total: int, parts: int) -> Tensor:
    """Split `total` into equal parts: int64 [parts], on the host. Example: even(7, 3) is [3, 2, 2]."""
    return torch.tensor([total // parts + (part < total % parts) for part in range(parts)])
