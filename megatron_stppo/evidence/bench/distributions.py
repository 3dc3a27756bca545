"""Compares derivatives by the logits, and the estimates of ||C|| from them, with float64.

A new model's distributions are nearly uniform, so hidden states and a head are planted: the distributions of
the rows are uniform to certain, and tokens are the most probable ones, or any.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megatron_stppo import ops
from megatron_stppo.evidence.bench.stage import first_wrong
from megatron_stppo.model.policy_head import PolicyHead

# allowed, relative to the largest number of a column: formulas; what passes through the model
FAR, ROUNDED = 1e-4, {torch.float32: 1e-3, torch.bfloat16: 3e-2}
ROWS, VOCAB, HIDDEN = 96, 61, 16


def distributions(head: PolicyHead, like: Tensor) -> Iterator[str]:
    """Yield what differs. head: its settings. like: a tensor of the model, for type and device."""
    draw, device = torch.Generator().manual_seed(1), like.device

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to(device)

    number_T = torch.arange(ROWS, device=device)
    hidden = normal(ROWS, HIDDEN) * torch.linspace(0, 8, ROWS, device=device)[:, None]
    planted = [x.to(like.dtype).requires_grad_() for x in (hidden, normal(VOCAB, HIDDEN) / HIDDEN**0.5)]
    exact = [x.detach().double().requires_grad_() for x in planted]
    log_p = _log_p(head, planted, exact)
    target_T = torch.where(number_T % 4 < 2, log_p.argmax(1), number_T % VOCAB)
    own_T, entropy_T = log_p.gather(1, target_T[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    slopes = normal(2, ROWS) * (number_T % 3 > 0)  # some rows have none
    torch.autograd.backward(torch.stack([own_T, entropy_T]), slopes.double())

    def loss(chunk: ops.Chunk) -> tuple[Tensor, Tensor]:
        value = (torch.stack([chunk.logprob, chunk.entropy]) * slopes[:, chunk.first : chunk.last]).sum()
        return value, value.detach().reshape(1)

    (hidden, weight), ends = planted, [0, ROWS // 3, ROWS]
    value, _, _ = ops.linear_loss(
        hidden, weight, target_T, ends, loss, temperature=head.temperature, float32_logits=head.float32_logits
    )
    torch.autograd.backward(value)
    for name, leaf, needed in zip(("hidden states", "head"), planted, exact, strict=True):
        assert leaf.grad is not None and needed.grad is not None
        far = ROUNDED[like.dtype]
        yield from apart(f"derivative by planted {name}", leaf.grad.flatten(), needed.grad.flatten(), far)
    yield from _sizes(own_T.detach(), log_p.detach().exp(), target_T, normal(ROWS).abs() + 0.1)


def _log_p(head: PolicyHead, planted: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Return log p in float64 of the logits as they are rounded, with the derivatives of `exact`."""
    hidden, weight = (x.detach().float() if head.float32_logits else x.detach() for x in planted)
    logits = exact[0] @ exact[1].t()
    rounded = logits + ((hidden @ weight.t()).double() - logits).detach()
    return (rounded / head.temperature).log_softmax(1)


def _sizes(own_T: Tensor, p: Tensor, target_T: Tensor, advantage_T: Tensor) -> Iterator[str]:
    """Yield whether the sizes of C and of grad J, by the logits, differ. Every second token is clipped."""
    square_T = (functional.one_hot(target_T, VOCAB) - p).square().sum(1)  # of the derivative of a log-prob
    rise_T = torch.arange(ROWS, device=p.device) % 2
    now_T, of_all_T = own_T.float(), p.square().sum(1).float()
    out = ops.clipped_surrogate(now_T, now_T - rise_T, advantage_T, weight=1.0, sum_p_sq=of_all_T)
    needed_T = (rise_T.exp() * advantage_T).square() * square_T
    found = torch.stack([out.logit_bias_sq, out.logit_grad_sq])
    needed = torch.stack([needed_T[rise_T == n].sum() for n in (1, 0)])
    yield from apart("squares of ||C|| and ||grad J|| by planted logits", found, needed, FAR)


def apart(name: str, found: Tensor, needed: Tensor, far: float) -> list[str]:
    """Return the first number that differs by more than `far` of the largest one."""
    most = max(float(needed.abs().max()), 1e-12)
    return first_wrong(f"{name} / {most:.3g}", (found / most).tolist(), (needed / most).tolist(), far)
