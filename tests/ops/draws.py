"""Random inputs, drawn on the CPU and moved to the default device: equal on every device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_stppo import ops


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cpu") * scale).to(torch.get_default_device())


def uniform(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.get_default_device())


def offsets_of(*lengths: int) -> Tensor:
    """Example: (3, 0, 2) -> [0, 3, 3, 5]."""
    return torch.tensor([0, *lengths]).cumsum(0)


def unaligned(tensor: Tensor, by: int = 1) -> Tensor:
    """Return a contiguous copy that starts `by` elements after an aligned address."""
    room = tensor.new_empty(tensor.numel() + by)
    return room[by:].view_as(tensor).copy_(tensor)


def three(tokens: int, seed: int = 0, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprob, old_logprob, advantage [T]. With the default scale many short turns are clipped."""
    new, old, advantage = normal(3, tokens, seed=seed).unbind()
    return new * scale, old * scale, advantage


def rows(count: int, columns: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return logits [count, columns] and a target for each row."""
    return normal(count, columns, seed=seed, scale=scale), integers(columns, count, seed=seed + 1)


def logprob_and_gradient(logits: Tensor, target: Tensor, **settings) -> tuple[Tensor, ...]:
    """Return the three outputs and the gradient of the logits for output gradients 1, 2, 3."""
    logits = logits.detach().requires_grad_()
    outputs = ops.vocab_logprob(logits, target, **settings)
    sum((i + 1.0) * out.sum() for i, out in enumerate(outputs)).backward()
    return *(out.detach() for out in outputs), logits.grad


def same_bits(left, right) -> bool:
    """Return whether two sequences of tensors are bitwise equal, including NaN and -0.0."""
    flat = [[t.detach().reshape(-1).view(torch.uint8) for t in x if t is not None] for x in (left, right)]
    return all(a.equal(b) for a, b in zip(*flat, strict=True))


@contextmanager
def fallback() -> Iterator[None]:
    """Run the ops in a block with the torch fallback, whichever implementation the test uses."""
    before = os.environ["STPPO_OPS"]
    os.environ["STPPO_OPS"] = "torch"
    try:
        yield
    finally:
        os.environ["STPPO_OPS"] = before
