"""Prefix trees: tokens that trajectories of a microbatch have in common at their start are computed once.

Causal attention and positions give a token the same hidden state in every trajectory that begins with the
same tokens: system prompt and tools of all tasks, the question of a task's samples, the histories of an
agent's episode. Sorted by their tokens, trajectories with long common prefixes are neighbours, and the common
prefixes of neighbours describe the whole tree: two trajectories have as many tokens in common as the two
neighbours between them that have the fewest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_stppo.base.types import Batch

LEAST = 0.05  # share of the tokens; with less in common, gathering keys and values is not worth it
# tokens of a micro-batch's trajectories / its budget: keys and values of all of them take memory in attention
MOST = 16


@dataclass(frozen=True)
class Tree:
    """Trajectories, sorted so that neighbours have the longest common prefixes.

    Example: those with the tokens ab, cd and abe are Tree([0, 2, 1], [2, 3, 2], [0, 2, 0]): they have 5
    distinct tokens, a token being distinct by the tokens before it.
    """

    order: Sequence[int]  # [n]: place of each trajectory among those that were given
    lengths: np.ndarray  # int64 [n] tokens, in this order
    common: np.ndarray  # int64 [n] tokens in common with the one before, in this order; 0 for the first

    @classmethod
    def of(cls, batch: Batch, chosen: Sequence[int], marks_P: Tensor | None = None) -> Tree:
        """Return the tree of the trajectories `chosen`, whose tokens the rank must hold.

        It has no common prefixes if they are less than LEAST of all tokens.
        marks_P: int64, see routes.marks; tokens with different marks are different tokens.
        """
        lengths, columns = batch.sequence_offsets.diff().tolist(), [batch.tokens_P]
        rows = torch.stack(columns if marks_P is None else [*columns, marks_P], dim=1).numpy()
        held, width = batch.held_N.tolist(), rows.shape[1]
        given = [rows[held[i] : held[i] + lengths[i]].reshape(-1) for i in chosen]
        keys = [one.tobytes() for one in given]
        order = sorted(range(len(given)), key=keys.__getitem__)
        common = [0] * len(order)
        for n in range(1, len(order)):
            before, one = (given[i] for i in order[n - 1 : n + 1])
            both = min(len(before), len(one))
            differ = before[:both] != one[:both]
            first = int(differ.argmax()) if both else 0
            common[n] = (first if both and differ[first] else both) // width
        of = [len(given[i]) // width for i in order]
        tree = cls(order, np.array(of, dtype=np.int64), np.array(common, dtype=np.int64))
        saves = sum(common) >= LEAST * tree.lengths.sum()
        return tree if saves else cls.plain([lengths[i] for i in chosen])

    @classmethod
    def plain(cls, lengths: Sequence[int]) -> Tree:
        """Return the tree of trajectories of which nothing is known to be common."""
        of = np.array(lengths, dtype=np.int64)
        return cls(range(len(of)), of, np.zeros_like(of))

    def bins(self, budget: int) -> list[list[int]]:
        """Divide the trajectories into bins of at most `budget` distinct tokens, and of at most MOST times as
        many tokens with those that repeat others; return ascending places.

        Whole subtrees that fit are put into bins, the largest first: each into the bin with room to which it
        adds the fewest tokens. A trajectory that is longer than the budget gets its own bin.
        Example: lengths [3, 9, 2, 2] without common prefixes and budget 4: [[1], [0], [2, 3]].
        """
        upto, every = (np.concatenate([[0], n.cumsum()]) for n in (self.lengths - self.common, self.lengths))
        subtrees = [
            (int(self.lengths[a] + upto[b] - upto[a + 1]), min(self.order[a:b]), a, b)
            for a, b in self._subtrees(upto, every, budget)
        ]
        common = [*self.common.tolist(), 0]
        bin_of, used = np.full(len(self.lengths), -1), 0
        room = np.full(len(subtrees), budget)
        left = MOST * room  # as room, but of the tokens with those that repeat others
        for size, _, a, b in sorted(subtrees, key=lambda one: (-one[0], one[1])):
            added, with_repeats = np.full(used, size), every[b] - every[a]
            if common[a] or common[b]:  # others have tokens in common with it
                placed, best = bin_of >= 0, np.zeros(used, dtype=np.int64)
                np.maximum.at(best, bin_of[placed], self._common_with(a, b)[placed])
                added -= best
            fits = np.flatnonzero((added <= room[:used]) & (with_repeats <= left[:used]))
            at, taken = used, size
            if len(fits):
                at = int(fits[added[fits].argmin()])
                taken = added[at]
            used = max(used, at + 1)
            bin_of[a:b] = at
            room[at] -= taken
            left[at] -= with_repeats
        bins: list[list[int]] = [[] for _ in range(used)]
        for place, at in sorted(zip(self.order, bin_of.tolist(), strict=True)):
            bins[at].append(place)
        return bins

    def _subtrees(self, upto: np.ndarray, every: np.ndarray, budget: int) -> list[tuple[int, int]]:
        """Return the largest subtrees that fit into a bin, as slices of the order."""
        found, left = list[tuple[int, int]](), [(0, len(self.lengths))] if len(self.lengths) else []
        while left:
            a, b = left.pop()
            fits = self.lengths[a] + upto[b] - upto[a + 1] <= budget
            if b - a == 1 or (fits and every[b] - every[a] <= MOST * budget):
                found.append((a, b))
                continue
            inner = self.common[a + 1 : b]
            cuts = [a, *(a + 1 + np.flatnonzero(inner == inner.min())).tolist(), b]
            left += pairwise(cuts)
        return found

    def _common_with(self, a: int, b: int) -> np.ndarray:
        """Return the tokens that each trajectory outside a slice has in common with the slice, int64 [n]."""
        out = np.zeros_like(self.common)
        out[b:] = np.minimum.accumulate(self.common[b:])
        out[:a] = np.minimum.accumulate(self.common[a:0:-1])[::-1]
        return out

    @cached_property
    def _at(self) -> np.ndarray:
        """The index in this order of each place, int64 [n]."""
        return np.argsort(self.order)

    def packed(self, run: Sequence[int]) -> Segments:
        """Return the layout of the trajectories at the places `run`, each distinct token being there once."""
        at = self._at[np.array(run, dtype=np.int64)]
        by_tree = np.argsort(at)
        at = at[by_tree]
        common, lengths = np.zeros_like(at), self.lengths[at]
        if len(at) > 1:  # the least in common of all neighbours between two
            common[1:] = np.minimum.reduceat(self.common[: at[-1] + 1], at[:-1] + 1)
        own = lengths - common
        path, paths = np.zeros(0, dtype=np.int64), [np.zeros(0, dtype=np.int64)] * len(at)
        columns = (by_tree, common, own.cumsum() - own, own.cumsum())
        for n, both, start, end in zip(*(column.tolist() for column in columns), strict=True):
            paths[n] = path = np.concatenate([path[:both], np.arange(start, end)])
        places = np.concatenate([path[:0], *paths])
        if not common.any():
            return Segments(own, places, None)
        pieces = [paths[n] for n, new in zip(by_tree, own, strict=True) if new]
        keys = (np.array([len(one) for one in pieces]), np.concatenate(pieces))
        return Segments(own[own > 0], places, keys)


@dataclass(frozen=True)
class Segments:
    """The layout of the tokens of some trajectories: m segments, one after another.

    A segment has those tokens of a trajectory that are in no segment before it, and attends to the tokens of
    the whole trajectory up to its own.
    Example: trajectories of the tokens abcde and abcfgh become segments of 5 and 3 tokens; the tokens of the
    second are at the places [0, 1, 2, 5, 6, 7], which are also the second segment's keys.
    """

    lengths: np.ndarray  # int64 [m]
    places: np.ndarray  # int64: the place of each token of each trajectory, trajectory after trajectory
    # int64 [m] and the places of the keys, segment after segment; None: the segments are the trajectories
    keys: tuple[np.ndarray, np.ndarray] | None
