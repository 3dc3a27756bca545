"""The packed sequences of a micro-batch, as gated delta nets need them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_stppo.model.delta_net.rule import Chunks
from megatron_stppo.ops.transfer import to_device


@dataclass(frozen=True)
class Sequences:
    """Example: sequences of 2 and 3 tokens are Sequences(tensor([0, 1, 0, 1, 2]), (2, 3))."""

    position_P: Tensor  # int64: index of each token in its sequence
    lengths: tuple[int, ...]

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of the rule, on the device of the positions."""
        return Chunks.of(self.lengths, self.position_P.device)

    @cached_property
    def starts(self) -> Tensor:
        """int64 [sequences + 1]: the first token of each sequence, and P. Example: [0, 2, 5]."""
        return to_device(torch.tensor([0, *accumulate(self.lengths)]), self.position_P.device)

    @cached_property
    def number_P(self) -> Tensor:
        """int32: the number of each token's sequence. Example: [0, 0, 1, 1, 1]."""
        return ((self.position_P == 0).cumsum(0) - 1).int()
