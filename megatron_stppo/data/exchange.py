"""Exchange of trajectories between the ranks: every trajectory travels once, to the ranks that train on it.

A rollout leaves every trajectory on one rank. All ranks get the summaries and the engine's log-probs (4 bytes
per action token), from which they compute the same statistics and the same division of the trajectories. Only
the ranks that train on a trajectory get its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import Batch, BatchT, Summary, Trajectory
from megatron_stppo.data.packing import holding, rollout_logprobs, rows_of, token_ids, without_tokens
from megatron_stppo.data.routes import joined
from megatron_stppo.parallel.collectives import (
    Group,
    all_gather_bytes,
    all_reduce_max,
    all_to_all,
    gather_records,
    refused_together,
)


@dataclass(frozen=True)
class Played:
    """The trajectories of a rollout.

    Example: rank 1 of 2, on which trajectories 3 to 5 of 6 were left, has counts [3, 3] and
    every[3:] == [t.summary for t in own].
    """

    every: list[Summary]  # [N], equal on every rank
    own: list[Trajectory]  # those that were left on this rank
    counts: list[int]  # how many were left on each rank; in rank order they are all trajectories
    # those of groups that rollout.resample has replaced, which are not trained on; None if it is 0
    dropped: list[Summary] | None = None

    @classmethod
    def of(cls, own: list[Trajectory]) -> Played:
        """Gather the summaries. Every history of an episode becomes a trajectory. Collective."""
        own = [history for trajectory in own for history in trajectory.histories()]
        of_rank = gather_records([t.summary for t in own], Summary)
        return cls([s for summaries in of_rank for s in summaries], own, [len(s) for s in of_rank])

    @property
    def with_dropped(self) -> list[Summary]:
        """The summaries of all episodes that were played."""
        return [*self.every, *(self.dropped or ())]

    def described(self) -> Batch:
        """Return the batch of all trajectories without tokens, equal on every rank. Collective."""
        every = b"".join(all_gather_bytes(rollout_logprobs(self.own).numpy().tobytes()))
        logprob_T = torch.from_numpy(np.frombuffer(bytearray(every), dtype=np.float32))
        return without_tokens(self.every, logprob_T)

    def delivered(self, batch: BatchT, wanted: Sequence[Sequence[int]]) -> BatchT:
        """Return the batch with the tokens of the trajectories wanted[rank]. Collective.

        wanted: the trajectories of every rank, in ascending order; equal on every rank.
        """
        tokens_P = deal(token_ids(self.own).int(), batch, self._given(), wanted)
        return holding(batch, wanted[dist.get_rank()], tokens_P.long())

    def routes(
        self, batch: Batch, wanted: Sequence[Sequence[int]], layers: int, chosen: int, experts: int
    ) -> Tensor:
        """Return the engine's experts of the tokens wanted[rank], [tokens, layers, chosen]. Collective.

        Raises ConfigError on all ranks if those of any trajectory were not recorded.
        """
        with refused_together():
            recorded_P = joined(self.own, layers, chosen, experts)
        return deal(recorded_P, batch, self._given(), wanted)

    def _given(self) -> list[range]:
        ends = np.cumsum(self.counts)
        return [range(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def deal(
    values: Tensor,
    batch: Batch,
    given: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    group: Group = None,
) -> Tensor:
    """Send each rank r the values of the trajectories wanted[r], and return those for this rank.

    Collective. values: [tokens, ...] of the trajectories given[rank], one after another; the result has those
    of wanted[rank]. given, wanted: trajectories of every rank, equal on every rank; `given` has each once.
    """
    rank, lengths = dist.get_rank(group), batch.sequence_offsets.diff().tolist()
    own = dict(zip(given[rank], values.split([lengths[n] for n in given[rank]]), strict=True))
    owner = {n: r for r, of_rank in enumerate(given) for n in of_rank}
    sent = [torch.cat([values[:0], *(own[n] for n in of_rank if n in own)]) for of_rank in wanted]
    sources: list[list[int]] = [[] for _ in given]
    for n in wanted[rank]:
        sources[owner[n]].append(n)
    sizes = [sum(lengths[n] for n in of_rank) for of_rank in sources]
    received = all_to_all(torch.cat(sent), [len(x) for x in sent], sizes, group)
    order = [n for of_rank in sources for n in of_rank]
    parts = dict(zip(order, received.split([lengths[n] for n in order]), strict=True))
    return torch.cat([received[:0], *(parts[n] for n in wanted[rank])])


def undivided(batch: Batch, group: Group = None) -> Batch:
    """Return the batch with the tokens and routes of all trajectories, each held by some rank of the group.

    Collective. Needs the memory that dividing the tokens saves.
    """
    every = torch.arange(len(batch.held_N))
    held = every[batch.held_N >= 0]
    rows = rows_of(replace(batch, held_N=batch.sequence_offsets[:-1]), held)

    def spread(value_P: Tensor) -> Tensor:
        out = value_P.new_zeros(batch.tokens, *value_P.shape[1:])
        out[rows] = value_P
        return all_reduce_max(out, group)

    routes_P = None if batch.routes_P is None else spread(batch.routes_P)
    return replace(holding(batch, every.tolist(), spread(batch.tokens_P)), routes_P=routes_P)
