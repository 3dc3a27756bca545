"""A loss in place of the clipped surrogate (`algorithm.loss`) and an advantage of the user
(`algorithm.advantage`): signatures, checks, and the losses that are known by name.

Call check_loss or check_advantage in a test of your own; a run calls them at its start.

Example of a loss, PPO's without clipping, and of an advantage, the outcome less the batch's mean:

    def loss(logprob_T, old_logprob_T, advantage_T, offsets):
        return -(logprob_T - old_logprob_T).exp() * advantage_T

    def advantage(outcome_N, group_N, counted_N):
        return outcome_N - outcome_N[counted_N].mean()
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import MAX_LOG_RATIO

SEGMENTS = ((0, 3), (3, 4), (4, 9))  # of the tokens of a check


class OwnLoss(Protocol):
    def __call__(
        self, logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, offsets: Tensor | None
    ) -> Tensor:
        """Return the loss of each action token, [T], which is minimised; autograd differentiates it.

        logprob_T: float32 [T], under the policy that is trained. old_logprob_T, advantage_T: float32 [T].
        offsets: int64 [S+1], the segments of `algorithm.segments`; None: every token is one.
        The tokens are some whole segments of a minibatch. Token t counts with the weight c_t of
        `algorithm.aggregation`; tokens of failed trajectories have the weight 0 and the advantage 0.
        """


class OwnAdvantage(Protocol):
    def __call__(self, outcome_N: Tensor, group_N: Tensor, counted_N: Tensor) -> Tensor:
        """Return the advantage of each trajectory, [N], which all of its action tokens get.

        outcome_N: float64 [N], the sum of its rewards. group_N: int64 [N], equal for the trajectories of one
        task. counted_N: bool [N], those that a mean should count. It is False for failed trajectories, whose
        advantage becomes 0, and for all but the first of the trajectories that one episode of an agent left.
        """


def check_loss(loss: OwnLoss) -> None:
    """Raise ValueError unless the loss has the shape of the log-probs, finite values and gradients that are
    the same in float32 and float64, and depends on a token's own segment only.

    Segments are divided over micro-batches and ranks in any way, so that a loss that mixes them would depend
    on the layout. Numbers that are multiplied by the gradient, such as a ratio, may be detached.
    """
    generator = torch.Generator().manual_seed(0)
    total = SEGMENTS[-1][1]
    log_T, old_T, advantage_T = (torch.randn(total, generator=generator) for _ in range(3))
    log_T, old_T = -log_T.abs() - 0.1, -old_T.abs() - 0.1
    offsets = torch.tensor([0, *(end for _, end in SEGMENTS)])
    for given in (None, offsets):
        found = _value_and_gradient(loss, log_T, old_T, advantage_T, given)
        exact = _value_and_gradient(loss, log_T.double(), old_T.double(), advantage_T.double(), given)
        for what, in_32, in_64 in zip(("values", "gradients"), found, exact, strict=True):
            if not torch.allclose(in_32.double(), in_64, rtol=1e-4, atol=1e-5):
                off = float((in_32.double() - in_64).abs().max())
                raise ValueError(
                    f"loss: {what} in float32 and float64 differ by {off:.2g}; subtract before exp"
                )
        for first, last in SEGMENTS:
            rows = slice(first, last)
            alone = None if given is None else torch.tensor([0, last - first])
            cut = [x[rows].double() for x in (log_T, old_T, advantage_T)]
            part = _value_and_gradient(loss, cut[0], cut[1], cut[2], alone)
            if not all(torch.allclose(x, y[rows], rtol=1e-9) for x, y in zip(part, exact, strict=True)):
                raise ValueError("loss: a token's loss depends on other segments; use only its own")


def _value_and_gradient(
    loss: OwnLoss, logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    logprob_T = logprob_T.clone().requires_grad_()
    loss_T = loss(logprob_T, old_T, advantage_T, offsets)
    _check_result("loss", loss_T, len(logprob_T))
    if not loss_T.requires_grad:
        raise ValueError("loss: its result has no gradient; compute it from logprob_T with torch")
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    _check_result("loss: its gradient", gradient_T, len(logprob_T))
    return loss_T.detach(), gradient_T


def check_advantage(advantage: OwnAdvantage) -> None:
    """Raise ValueError unless the advantage has the shape of the outcomes and finite values, also if a group
    has equal outcomes, one trajectory, or failed ones."""
    group_N = torch.tensor([0, 0, 0, 1, 1, 2])
    counted_N = torch.tensor([True, True, False, True, True, True])
    for outcome in ([0.0, 1.0, 0.5, 1.0, 1.0, 2.0], [1.0] * 6):
        found_N = advantage(torch.tensor(outcome, dtype=torch.float64), group_N, counted_N)
        _check_result("advantage", found_N, len(group_N))


def _check_result(name: str, found: Tensor, total: int) -> None:
    if not isinstance(found, Tensor) or found.shape != (total,) or not found.is_floating_point():
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{name}: returned {what} for {total} inputs; return a float tensor [{total}]")
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"{name}: returned numbers that are not finite")


# Losses that the clipped surrogate cannot express: their ratio is a constant. Beside the arguments of OwnLoss
# they take the bounds of the ratio, of which `high` is at least 1.


def cispo(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    offsets: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """Return -clip(r, low, high) A log pi, where r = pi / pi_old is a constant.

    A token whose ratio is limited keeps its gradient. Source: MiniMax-M1, arXiv 2506.13585, equation 4.

    Example: r = 6, high = 5, A = 2: the gradient of the log-prob is -10.
    """
    delta_T = (logprob_T.detach() - old_logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return -delta_T.exp().clamp(low, high) * advantage_T * logprob_T


LOSSES: dict[str, Callable[..., Tensor]] = {"cispo": cispo}
