"""A control without importance ratios: the plain policy gradient in every step, however old its tokens."""

from torch import Tensor


def loss(logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, offsets: Tensor | None) -> Tensor:
    """Return -A log pi of each token."""
    return -advantage_T * logprob_T
