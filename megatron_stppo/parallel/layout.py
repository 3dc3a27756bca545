"""Where each rank stands in the mesh tensor x data x pipeline, as arithmetic: no torch, no process group.

The rank order is megatron-core's default "tp-cp-ep-dp-pp": the tensor axis runs fastest, then data, then
pipeline, so a tensor-parallel group is a run of neighbouring ranks on one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_stppo.config import ConfigError


class Coordinates(NamedTuple):
    tensor: int
    pipeline: int
    data: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes.

    Example: Layout(tensor=2, pipeline=2, data=3) has 12 ranks; rank 9 = 1 + 2 * (1 + 3 * 1) stands at
    Coordinates(tensor=1, pipeline=1, data=1).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of_world(cls, world: int, tensor: int, pipeline: int) -> Layout:
        """The layout whose data axis takes the ranks that are left. Raises ConfigError if some remain."""
        data, rest = divmod(world, tensor * pipeline)
        if rest or not data:
            raise ConfigError(
                f"parallel.tensor={tensor} * parallel.pipeline={pipeline} must divide the number of ranks "
                f"{world}; start a multiple of {tensor * pipeline} ranks"
            )
        return cls(tensor, pipeline, data)

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, pipeline, data)

    def rank(self, at: Coordinates) -> int:
        return at.tensor + self.tensor * (at.data + self.data * at.pipeline)
