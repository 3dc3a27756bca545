"""The division of a batch: into the minibatches of the optimizer steps, over the data-parallel ranks, and
into micro-batches.

Minibatches and ranks are decided once per iteration (`divided` in training/stages.py), and all stages use the
same. Matrix products of other sizes round differently, and the importance ratios of the first minibatch would
not be exactly 1.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch, Minibatch
from megatron_stppo.config import Config
from megatron_stppo.data import routes
from megatron_stppo.data.packing import Microbatch, PackingSpec, microbatch_runs, pack, prefixes_of, routed
from megatron_stppo.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_stppo.parallel.groups import MeshRank

# the columns of a Batch that decide its microbatches, beside the recorded experts
PACKED = ("tokens_P", "held_N", "action_index_T", "turn_offsets")


def minibatches(first_N: Tensor, count: int, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """Return a random permutation of the episodes, cut into `count` parts, equal up to one episode.

    first_N: bool [N], the trajectories that begin an episode. The others of an episode follow it.
    The result depends only on the arguments, so resuming needs no saved state.

    Example: 8 trajectories and count 4 give four minibatches of 2. 9 trajectories of 8 episodes, as one with
    a branch adds one, give three of 2 and one of 3.
    """
    ends = [*first_N.nonzero().flatten().tolist(), len(first_N)]
    episodes = [list(range(*pair)) for pair in pairwise(ends)]
    assert len(episodes) >= count, (len(episodes), count)
    random.Random(f"{seed}/{iteration}/{epoch}").shuffle(episodes)  # a text seed is hashed equally everywhere
    cuts = [len(episodes) * part // count for part in range(count + 1)]
    return [[n for episode in episodes[start:end] for n in episode] for start, end in pairwise(cuts)]


def chosen_tokens(batch: Batch, chosen: Sequence[int]) -> Tensor:
    """Return the mask of the action tokens of the chosen trajectories, bool [T]."""
    chosen_N = torch.zeros(len(batch.live_N), dtype=torch.bool)
    chosen_N[torch.tensor(chosen)] = True
    return chosen_N.repeat_interleave(batch.action_offsets.diff())


@dataclass(frozen=True)
class Packer:
    """Divides minibatches over the data-parallel ranks, and this rank's part of one into microbatches."""

    spec: PackingSpec
    mesh: MeshRank
    hidden: int  # hidden size of the model, for `cost`
    device: torch.device | str | int
    by_route: bool = False  # prefixes are shared only where their recorded experts agree too
    # {minibatch: [(batch, its microbatches)]}, see `keep`; a replaced Packer has its own
    kept: dict[Minibatch, list[tuple[Batch, Sequence[Microbatch]]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: Config, hidden: int, mesh: MeshRank, share_prefixes: bool) -> Packer:
        """hidden: the model's hidden size. share_prefixes: see prefixes.py."""
        spec = PackingSpec(
            config.update.tokens_per_microbatch,
            mesh.tensor_size if config.parallel.sequence else 1,
            mesh.context_rank,
            mesh.context_size,
            # the interleaved schedule processes groups of microbatches, which must have equal lengths
            in_step=mesh.pipeline_size if mesh.layout.virtual > 1 else 1,
            equal=mesh.layout.virtual > 1,
            share_prefixes=share_prefixes,
        )
        return cls(spec, mesh, hidden, torch.cuda.current_device(), config.replays_rollout)

    def divide(self, batch: Batch, chosen: Sequence[int]) -> Minibatch:
        """Divide the chosen trajectories over the data-parallel ranks, balanced by `cost`."""
        index = torch.tensor(chosen)
        costs = [cost(length, self.hidden) for length in batch.sequence_offsets.diff()[index].tolist()]
        groups = saved = None
        if self.spec.share_prefixes:  # those of one prompt save its cost
            prompts, groups = prompts_of(batch, index)
            saved = [cost(length, self.hidden) for length in prompts]
        dealt = partition(costs, self.mesh.data_size, groups, saved)
        return Minibatch(tuple(chosen), tuple(tuple(chosen[i] for i in part) for part in dealt))

    def whole(self, batch: Batch) -> Minibatch:
        """Return the minibatch of all trajectories."""
        return self.divide(batch, range(len(batch.live_N)))

    def keep(self, together: Sequence[Minibatch]) -> None:
        """Keep the microbatches of these minibatches from now on, and drop those of others.

        So scoring and update of all models pack a minibatch once. They take up to 32 bytes per token on the
        device. Equal on every rank, because `pack` is collective.
        """
        kept = {minibatch: self.kept.get(minibatch, []) for minibatch in together}
        self.kept.clear()
        self.kept.update(kept)

    def pack(self, batch: Batch, minibatch: Minibatch) -> Sequence[Microbatch]:
        """Return the microbatches of this data-parallel rank's part of the minibatch. Collective."""
        kept = self.kept.get(minibatch)
        decisive = (*PACKED, "routes_P") if self.by_route else PACKED
        for given, microbatches in kept or ():
            if all(getattr(given, name) is getattr(batch, name) for name in decisive):
                return routed(microbatches, batch.routes_P, self.device)
        microbatches = self._pack(batch, minibatch.parts[self.mesh.data_rank])
        if kept is not None:
            kept.append((batch, microbatches))
        return routed(microbatches, batch.routes_P, self.device)

    def _pack(self, batch: Batch, mine: Sequence[int]) -> Sequence[Microbatch]:
        """Return the microbatches without recorded experts. Collective."""
        spec = self.spec
        tree = prefixes_of(batch, mine, spec, self._marks(batch))
        if self.mesh.layout.expert > 1:  # every layer has a collective over the ranks that share its experts
            most_here = all_reduce_max(torch.tensor([len(microbatch_runs(tree, spec))]), self.mesh.data_group)
            spec = replace(spec, in_step=int(most_here))
        return pack(replace(batch, routes_P=None), mine, spec, self.device, tree)

    def _marks(self, batch: Batch) -> Tensor | None:
        """Return the marks of the recorded experts of all layers, equal on every pipeline stage, or None if
        they do not matter. Collective."""
        if not (self.by_route and self.spec.share_prefixes and batch.routes_P is not None):
            return None
        marks_P = routes.marks(batch.routes_P, self.mesh.pipeline_rank)
        return all_reduce_sum(marks_P, self.mesh.pipeline_group) if self.mesh.pipeline_size > 1 else marks_P


def cost(length: int, hidden: int) -> float:
    """Return the cost of training on a trajectory, up to a constant factor.

    Per token and layer, matrix products take 12 H^2 multiplications, and causal attention takes H times the
    number of tokens before it.
    """
    return length * (12 * hidden + length)


def prompts_of(batch: Batch, index: Tensor) -> tuple[list[int], list[int]]:
    """Return (tokens of the prompt, a number that is equal for equal prompts) of the trajectories at `index`.

    Without a turn the prompt counts 0 tokens."""
    acts, padded = batch.action_offsets.diff()[index] > 0, torch.nn.functional.pad
    first_T = padded(batch.action_index_T, (0, 1))[batch.action_offsets[index]]
    tokens = (first_T - batch.sequence_offsets[index]).where(acts, 0)
    first_S = torch.searchsorted(batch.turn_to_sequence_S, index)
    return tokens.tolist(), padded(batch.state_S, (0, 1))[first_S].where(acts, -index).tolist()


def partition(
    costs: Sequence[float],
    ranks: int,
    groups: Sequence[int] | None = None,
    saved: Sequence[float] | None = None,
) -> list[list[int]]:
    """Distribute the indices of `costs` over ranks. Deterministic.

    Indices are assigned in the order of falling cost, each to the rank with the lowest sum so far.
    groups: equal numbers for indices of which only the first on a rank has its whole cost; each of the others
    saves saved[i]. Groups are kept together, or cut into parts, as the largest cost of a rank is
    lowest; a rank is empty only if there are fewer indices than ranks.

    Example: partition([5, 1, 4, 2], 2) returns [[0, 1], [2, 3]], with a sum of 6 each. With the groups 0, 1,
    0 and 1 and 4 saved by each, [5, 4, 5, 4] give [[0, 2], [1, 3]], with costs of 5 + 1 and 4 + 0.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(range(len(costs)) if groups is None else groups):
        members.setdefault(group, []).append(index)

    def cost_of(indices: Iterable[int]) -> float:
        of, found = dict[int, list[float]](), 0.0
        for i in indices:
            found += costs[i]
            of.setdefault(i if groups is None else groups[i], []).append(0.0 if saved is None else saved[i])
        return found - sum(sum(each) - max(each) for each in of.values())

    best, least, parts = list[list[int]](), (True, math.inf), 1
    while parts < 2 * max(map(len, members.values()), default=1):
        cut = (
            m[len(m) * n // parts : len(m) * (n + 1) // parts] for m in members.values() for n in range(parts)
        )
        dealt = _dealt([unit for unit in cut if unit], cost_of, ranks)
        found = (not all(dealt), max(map(cost_of, dealt)))  # a rank without a trajectory is worst
        best, least = (dealt, found) if not best or found < least else (best, least)
        parts *= 2
    return best


def _dealt(units: Sequence[list[int]], cost_of: Callable[[list[int]], float], ranks: int) -> list[list[int]]:
    found = [(cost_of(unit), unit) for unit in units]
    heap = [(0.0, 0, rank) for rank in range(ranks)]  # sum of costs, number of units, rank
    out: list[list[int]] = [[] for _ in range(ranks)]
    for cost, unit in sorted(found, key=lambda one: (-one[0], one[1])):
        total, count, rank = heap[0]
        out[rank] += unit
        heapq.heapreplace(heap, (total + cost, count + 1, rank))
    return [sorted(part) for part in out]
