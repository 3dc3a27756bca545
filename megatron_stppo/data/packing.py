"""Trajectories into one packed batch, a batch into microbatches by token budget, and results back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.types import FAILED, Batch, Trajectory


@dataclass(frozen=True)
class Microbatch:
    """Some trajectories of a Batch, packed for one forward pass. Same axes as Batch, P and T counted inside.

    `padding` dummy tokens stand at the end of P as a sequence of their own, so that P divides by the
    tensor-parallel size under sequence parallelism. rows_T says which action tokens of the Batch these are.
    """

    tokens_P: Tensor  # int64
    position_P: Tensor  # int64
    sequence_offsets: Tensor  # int32 [n+1 or n+2], padding included
    hidden_index_T: Tensor  # int64 into P: the position whose hidden state predicts the action token
    target_T: Tensor  # int64, the action tokens
    turn_offsets: Tensor  # int64 into T
    action_offsets: Tensor  # int64 into T
    rows_T: Tensor  # int64 into the Batch's T
    longest: int

    @property
    def tokens(self) -> int:
        return len(self.tokens_P)


def to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Packs trajectories on the host. A failed trajectory (error, timeout) keeps its place but is not
    live."""
    tokens, positions, action_index = [], [], []
    sequence_offsets, turn_offsets, turn_to_sequence, action_offsets = [0], [0], [], [0]
    rollout_logprob: list[float] = []
    reward: list[float] = []
    for n, trajectory in enumerate(trajectories):
        start = len(tokens)
        ids = trajectory.token_ids
        tokens += ids
        positions += range(len(ids))
        action_index += (start + p for p in trajectory.action_positions)
        sequence_offsets.append(len(tokens))
        for turn in trajectory.turns:
            rollout_logprob += turn.rollout_logprob
            reward += [0.0] * (len(turn.token_ids) - 1) + [turn.reward]
            turn_offsets.append(turn_offsets[-1] + len(turn.token_ids))
            turn_to_sequence.append(n)
        action_offsets.append(turn_offsets[-1])
    assert len(rollout_logprob) == len(action_index) == len(reward)
    live = [t.outcome not in FAILED and bool(t.turns) for t in trajectories]
    return Batch(
        tokens_P=torch.tensor(tokens, dtype=torch.int64),
        position_P=torch.tensor(positions, dtype=torch.int64),
        sequence_offsets=torch.tensor(sequence_offsets),
        turn_offsets=torch.tensor(turn_offsets),
        turn_to_sequence_S=torch.tensor(turn_to_sequence, dtype=torch.int64),
        action_offsets=torch.tensor(action_offsets),
        action_index_T=torch.tensor(action_index, dtype=torch.int64),
        live_N=torch.tensor(live),
        rollout_logprob_T=torch.tensor(rollout_logprob, dtype=torch.float32),
        reward_T=torch.tensor(reward, dtype=torch.float32),
    )


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deals indices of `lengths` to ranks: equal counts, longest first in snake order. Deterministic.

    Example: deal([5, 1, 4, 2], 2) is [[0, 1], [2, 3]], 6 tokens each.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        row = order[start : start + ranks]
        turn = hands if (start // ranks) % 2 == 0 else hands[::-1]
        for hand, index in zip(turn, row, strict=False):
            hand.append(index)
    return [sorted(hand) for hand in hands]


def split_by_budget(lengths: Sequence[int], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts `chosen` into runs of at most `budget` tokens, in order; a longer single trajectory is a run of
    its own."""
    runs: list[list[int]] = []
    filled = 0
    for index in chosen:
        if not runs or filled + lengths[index] > budget:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += lengths[index]
    return runs


def pack(
    batch: Batch, chosen: Sequence[int], budget: int, multiple: int = 1, device: torch.device | str = "cpu"
) -> list[Microbatch]:
    """Packs the chosen trajectories into microbatches of at most `budget` tokens, P rounded up to
    `multiple`."""
    lengths = batch.sequence_offsets.diff().tolist()
    return [_pack_one(batch, run, multiple, device) for run in split_by_budget(lengths, chosen, budget)]


def _pack_one(batch: Batch, run: Sequence[int], multiple: int, device: torch.device | str) -> Microbatch:
    index = torch.tensor(run, dtype=torch.int64)
    rows_P, lengths = _slices(batch.sequence_offsets, index)
    rows_T, counts = _slices(batch.action_offsets, index)
    start_of_rows_P = torch.repeat_interleave(_offsets(lengths)[:-1] - batch.sequence_offsets[index], counts)
    turns = torch.cat([torch.nonzero(batch.turn_to_sequence_S == i).squeeze(1) for i in run])
    padding = -len(rows_P) % multiple
    ends = [*_offsets(lengths).tolist(), *([len(rows_P) + padding] if padding else [])]
    to = {"device": device, "non_blocking": True}
    return Microbatch(
        tokens_P=torch.nn.functional.pad(batch.tokens_P[rows_P], (0, padding)).to(**to),
        position_P=torch.cat([batch.position_P[rows_P], torch.arange(padding)]).to(**to),
        sequence_offsets=torch.tensor(ends, dtype=torch.int32).to(**to),
        hidden_index_T=(batch.action_index_T[rows_T] + start_of_rows_P - 1).to(**to),
        target_T=batch.tokens_P[batch.action_index_T[rows_T]].to(**to),
        turn_offsets=_offsets(batch.turn_offsets.diff()[turns]).to(**to),
        action_offsets=_offsets(counts).to(**to),
        rows_T=rows_T,
        longest=max([*lengths.tolist(), padding]),
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _slices(offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the chosen slices one after the other, and their lengths."""
    lengths = offsets.diff()[index]
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(_offsets(lengths)[:-1], lengths)
    return torch.repeat_interleave(offsets[index], lengths) + within, lengths


def unpack(microbatches: Sequence[Microbatch], values: Sequence[Tensor], total: int) -> Tensor:
    """Puts per-microbatch values [T_i] back to their rows of the Batch: float32 [total], zero elsewhere, on
    the host."""
    out = torch.zeros(total)
    for microbatch, value in zip(microbatches, values, strict=True):
        out[microbatch.rows_T] = value.detach().float().cpu()
    return out
