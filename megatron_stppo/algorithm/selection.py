"""Selection: which segments leave the surrogate, by how far they are from the old policy.

ratio: segments whose ratio is not inside the clip bounds, whatever the sign of the advantage. Source: SAO,
arXiv 2607.07508, for tokens. Its gradient is r A grad log pi inside the bounds, which is that of r A.

probability: tokens whose probability has changed by more than the bound in the direction of the advantage.
Source: DPPO-Binary-TV, arXiv 2602.04879. Difference: the ratio is not truncated at 20.

With both nothing is clipped. The KL and entropy terms of the loss keep all tokens.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import Pooling, ratio_of, segment_deltas, spread
from megatron_stppo.algorithm.surrogate import compared


class SelectionFields(Protocol):
    """The fields of the configuration's section `algorithm` that a selection reads."""

    @property
    def select(self) -> str: ...
    @property
    def select_bound(self) -> float: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def clip_length_power(self) -> float: ...
    @property
    def pooling(self) -> Pooling: ...


def leaving(
    a: SelectionFields,
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    segments: Tensor | None,
    add_up: Callable[[Tensor], object] = lambda sums: None,
) -> Tensor:
    """Return the tokens that leave the surrogate, bool [T].

    segments: offsets of the segments of the ratio; None: every token is one. add_up: adds the sums of ranks
    that hold parts of the same segments, in place.
    A segment with a NaN stays, so that the step is skipped. Tokens of weight 0 may hold NaN.
    """
    total, logprob_T = len(logprob_T), logprob_T.detach()
    if a.select == "ratio":
        sums = torch.stack(segment_deltas(logprob_T, old_logprob_T, segments), dim=1)
        if segments is not None:  # a token is on one rank only
            add_up(sums)
        ratio_S, _ = ratio_of(sums[:, 0], sums[:, 1], a.pooling)
        compared_S = compared(ratio_S, sums[:, 1], a.clip_length_power, logprob_T.dtype)
        return spread((compared_S <= 1 - a.clip_low) | (compared_S >= 1 + a.clip_high), segments, total)
    if a.select == "probability":
        change_T = logprob_T.double().exp() - old_logprob_T.double().exp()
        rises_T = advantage_T > 0
        return (rises_T & (change_T > a.select_bound)) | (~rises_T & (change_T < -a.select_bound))
    return torch.zeros(total, dtype=torch.bool, device=logprob_T.device)
