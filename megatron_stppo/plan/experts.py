"""Even routing of tokens to experts, for meta tensors, which have no values to route by.

megatron's dispatcher reads from the device how many tokens each expert receives. Here every expert receives
the same number. A run whose router prefers some experts takes more memory on their ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
from torch import Tensor


@contextlib.contextmanager
def evenly_routed() -> Iterator[None]:
    """Make the dispatcher's counts even inside the context. The counts are on the host, all else on meta."""
    measured = Dispatcher.preprocess

    def preprocess(self: Dispatcher, routing_map: Tensor) -> Tensor:
        measured(self, routing_map)
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

    Dispatcher.preprocess = preprocess
    try:
        yield
    finally:
        Dispatcher.preprocess = measured


def forget(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop the last autograd graph that each dispatcher keeps.

    The graph is part of a reference cycle with the models, which Python's garbage collector does not find.
    """
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer):
                layer.token_dispatcher.probs = None


def even(total: int, parts: int) -> Tensor:
    """Split `total` into equal parts: int64 [parts], on the host. Example: even(7, 3) is [3, 2, 2]."""
    return torch.tensor([total // parts + (part < total % parts) for part in range(parts)])
