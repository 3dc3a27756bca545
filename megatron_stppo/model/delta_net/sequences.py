"""The packed sequences of a micro-batch, as gated delta nets need them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_stppo.model.delta_net.rule import Chunks


@dataclass(frozen=True)
class Sequences:
    """Example: sequences of 2 and 3 tokens are Sequences(tensor([0, 1, 0, 1, 2]), (2, 3))."""

    position_P: Tensor  # int64: index of each token in its sequence
    lengths: tuple[int, ...]

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of the rule, on the device of the positions."""
        return Chunks.of(self.lengths, self.position_P.device)
