"""Computes each rank's coordinates in the device mesh tensor x context x data x pipeline.

This is arithmetic only, without torch or process groups. The rank order is megatron-core's default
"tp-cp-ep-dp-pp": the tensor axis varies fastest, then context, data and pipeline, so a tensor-parallel group
consists of neighbouring ranks on one node. Expert parallelism divides the ranks of context x data a second
time, with context varying fastest.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from megatron_stppo.config import ConfigError, ParallelConfig


class Coordinates(NamedTuple):
    tensor: int
    pipeline: int
    data: int
    context: int = 0


@dataclass(frozen=True)
class Layout:
    """The sizes of the mesh's axes.

    Example: Layout(tensor=2, pipeline=2, data=3) has 12 ranks. Rank 9 = 1 + 2 * (1 + 3 * 1) has
    Coordinates(tensor=1, pipeline=1, data=1).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1  # divides context * data
    virtual: int = 1  # model chunks per pipeline rank
    first_stage_layers: int | None = None  # None: as many as a middle stage
    last_stage_layers: int | None = None  # None: as many as a middle stage

    @classmethod
    def of_world(cls, world: int, parallel: ParallelConfig) -> Self:
        """Return the layout of `world` ranks; the data axis has the ranks that the other axes leave.

        Raises ConfigError if `world` is not divisible by the sizes of the other axes.
        """
        p = parallel
        taken = p.tensor * p.context * p.pipeline
        data, rest = divmod(world, taken)
        if rest or not data:
            product = f"parallel.tensor={p.tensor} * parallel.pipeline={p.pipeline}"
            product += f" * parallel.context={p.context}" if p.context > 1 else ""
            raise ConfigError(
                f"{product} must divide the number of ranks {world}; start a multiple of {taken} ranks"
            )
        if p.context * data % p.expert:
            works = divisors(p.context * data)
            raise ConfigError(
                f"parallel.expert={p.expert} must divide the {p.context * data} ranks of context and data "
                f"parallelism; choose from {works}"
            )
        stages = (p.first_stage_layers, p.last_stage_layers)
        return cls(p.tensor, p.pipeline, data, p.context, p.expert, p.virtual, *stages)

    @property
    def world(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, pipeline, data, context)

    def rank(self, at: Coordinates) -> int:
        return at.tensor + self.tensor * (at.context + self.context * (at.data + self.data * at.pipeline))

    def expert_rank(self, rank: int) -> int:
        """Return the index, in 0 .. expert - 1, of the part of the experts that a rank holds."""
        at = self.coordinates(rank)
        return (at.context + self.context * at.data) % self.expert

    def stage_sizes(self, layers: int) -> list[int] | None:
        """Return the number of layers of each pipeline rank, summed over its chunks; None if the layers
        cannot be divided in this way."""
        ends = (self.first_stage_layers, self.last_stage_layers)
        between = self.pipeline - sum(end is not None for end in ends)
        left = layers - sum(end or 0 for end in ends)
        fits = left >= between and left % between == 0 if between else left == 0
        if not fits or (self.pipeline == 1 and ends != (None, None)):
            return None
        middle = [left // between] * between if between else []
        sizes = [size for size in (ends[0], *middle, ends[1]) if size]
        return None if any(size % self.virtual for size in sizes) else sizes

    def chunks(self, layers: int, stage: int) -> list[range]:
        """Return the layers of each model chunk of a pipeline rank.

        Example: with 8 layers on 2 pipeline ranks of 2 chunks, rank 0 has the layers [0, 2) and [4, 6).
        """
        sizes = self.stage_sizes(layers)
        assert sizes is not None, (layers, self)
        before, own = sum(sizes[:stage]) // self.virtual, sizes[stage] // self.virtual
        starts = [v * (layers // self.virtual) + before for v in range(self.virtual)]
        return [range(start, start + own) for start in starts]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
