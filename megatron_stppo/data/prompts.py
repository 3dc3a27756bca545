"""Shares prompts: trajectories of one task begin with the same prompt, which a microbatch computes only once.

A prompt that several trajectories of a microbatch share becomes one segment. The rest of each trajectory
becomes another segment, which attends to the prompt's segment and to itself. Causal attention and positions
are the same as for whole trajectories, so hidden states and gradients are equal too, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch


@dataclass(frozen=True)
class Segments:
    """The layout of the tokens of some trajectories, as m segments.

    Example: trajectories of 5 and 6 tokens that share a prompt of 3 become segments of 3, 2 and 3 tokens with
    history [-1, 0, 0]. The tokens of the second trajectory are at [0, 1, 2, 5, 6, 7].
    """

    lengths: Tensor  # int64 [m]
    history: Tensor  # int64 [m]: the segment before this one in its trajectory; -1: none
    places: Tensor  # int64: the position of each token of each trajectory, trajectory after trajectory


def segments(batch: Batch, run: Sequence[int]) -> Segments | None:
    """Return the layout of the trajectories `run`, or None if no two of them share a prompt."""
    together: dict[tuple[int, bytes], list[int]] = {}
    bounds = [_bounds(batch, i) for i in run]
    for at, (start, prompt, _) in enumerate(bounds):
        tokens = batch.tokens_P[start : start + prompt].numpy().tobytes()
        together.setdefault((at if prompt == 0 else -1, tokens), []).append(at)
    if len(together) == len(bounds):
        return None
    lengths: list[int] = []
    history: list[int] = []
    places: list[Tensor] = [torch.empty(0)] * len(bounds)
    end = 0
    for members in together.values():
        prompt = bounds[members[0]][1] if len(members) > 1 else 0
        first, before = end, len(lengths) if prompt else -1
        if prompt:
            lengths.append(prompt)
            history.append(-1)
            end += prompt
        for at in members:
            rest = bounds[at][2] - prompt
            places[at] = torch.cat([torch.arange(first, first + prompt), torch.arange(end, end + rest)])
            lengths.append(rest)
            history.append(before)
            end += rest
    return Segments(torch.tensor(lengths), torch.tensor(history), torch.cat(places))


def keys_of(lengths: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys that each segment attends to: (key lengths [m], positions of the keys, segment after
    segment).

    Example: lengths [3, 2] with history [-1, 0] return [3, 5] and [0, 1, 2, 0, 1, 2, 3, 4].
    """
    starts, keys = (lengths.cumsum(0) - lengths).tolist(), []
    for start, length, before in zip(starts, lengths.tolist(), history.tolist(), strict=True):
        own = torch.arange(start, start + length)
        earlier = (
            torch.arange(starts[before], starts[before] + int(lengths[before])) if before >= 0 else own[:0]
        )
        keys.append(torch.cat([earlier, own]))
    return torch.tensor([len(of_one) for of_one in keys]), torch.cat(keys)


def _bounds(batch: Batch, i: int) -> tuple[int, int, int]:
    """Return trajectory i's start in P, the length of its prompt (0 without action tokens) and its length."""
    start, end = batch.sequence_offsets[i : i + 2].tolist()
    first, last = batch.action_offsets[i : i + 2].tolist()
    prompt = int(batch.action_index_T[first]) - start if first < last else 0
    return int(batch.held_N[i]), prompt, end - start
