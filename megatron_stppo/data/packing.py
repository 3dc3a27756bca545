"""Packs trajectories into a batch, and a batch into microbatches by token budget; unpacks the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stppo.base.types import FAILED, Batch, Summary, Trajectory, TurnSummary
from megatron_stppo.data import context
from megatron_stppo.data.prefixes import Segments, Tree
from megatron_stppo.data.routes import unknown
from megatron_stppo.ops.transfer import to_device


@dataclass(frozen=True)
class Microbatch:
    """Some trajectories of a Batch, packed for one forward pass. It has the axes of Batch; P and T count the
    tokens of the microbatch.

    Under context parallelism this is one rank's share of the tokens (see context.py), and T are the action
    tokens that are predicted from this share; sequence_offsets and whole_* describe the shares of all ranks
    together. Under sequence parallelism, dummy tokens at the end make P divisible by the size of the tensor
    axis. Tokens that trajectories have in common at their start are there once; sequence_offsets and lengths
    then describe segments (see prefixes.py).
    """

    tokens_P: Tensor  # int64
    position_P: Tensor  # int64
    sequence_offsets: Tensor  # int32 [n+1 or n+2], padding included
    lengths: Tensor  # int64 [n or n+1] on the host: lengths of the same sequences
    hidden_index_T: Tensor  # int64 into P: position of the hidden state that predicts the action token
    target_T: Tensor  # int64, the action tokens
    turn_offsets: Tensor  # int64 into T, on the host, as the other three offsets: they decide chunks
    action_offsets: Tensor  # int64 into T
    whole_turn_offsets: Tensor  # int64
    whole_action_offsets: Tensor  # int64
    rows_T: Tensor  # int64 into the Batch's T, on the host: the action tokens of this microbatch
    rows_P: Tensor  # int64 into the Batch's P, on the host; -1 for dummy tokens
    longest: int  # tokens of the longest trajectory, padding included
    routes_P: Tensor | None = None  # int16, from the Batch; -1: the router chooses
    keys: tuple[Tensor, Tensor] | None = None  # on the host, if prefixes are shared: see prefixes.Segments
    # int64 [2, r] into the Batch's P, on the host: tokens that are not computed because they repeat others,
    # and these; None: there are none
    repeated: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.tokens_P)

    @property
    def distinct(self) -> tuple[int, int]:
        """The tokens of this rank that are computed, without dummies, and the tokens of its trajectories."""
        computed = int((self.rows_P >= 0).sum())
        return computed, computed + (0 if self.repeated is None else self.repeated.shape[1])


@dataclass(frozen=True)
class PackingSpec:
    """How a batch is cut into microbatches.

    Example: PackingSpec(budget=16384) puts up to 16,384 tokens per rank into a microbatch.
    """

    budget: int  # tokens of a microbatch on one rank; a longer trajectory is a microbatch of its own
    # P is padded to a multiple of this: the tensor-parallel size under sequence parallelism
    multiple: int = 1
    context_rank: int = 0
    context_size: int = 1
    in_step: int = 1  # the number of microbatches is a multiple of this; added ones hold only dummy tokens
    equal: bool = False  # all have as many tokens as the longest, for a pipeline that exchanges no shapes
    share_prefixes: bool = False  # see prefixes.py; needs context_size=1


def to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Pack trajectories into a batch on the host that holds all their tokens.

    Failed trajectories (error, timeout) are included but not live."""
    batch = without_tokens([t.summary for t in trajectories], rollout_logprobs(trajectories))
    return holding(batch, range(len(trajectories)), token_ids(trajectories))


def token_ids(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the tokens of the trajectories, one after another, int64."""
    return torch.tensor([token for t in trajectories for token in t.token_ids], dtype=torch.int64)


def rollout_logprobs(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the engine's log-probs of the action tokens, float32 [T]."""
    return torch.tensor([x for t in trajectories for turn in t.turns for x in turn.rollout_logprob]).float()


def without_tokens(summaries: Sequence[Summary], rollout_logprob_T: Tensor) -> Batch:
    """Return a batch of all trajectories in which this rank holds no tokens."""
    turns: list[TurnSummary] = []
    turn_to_sequence: list[int] = []
    starts: list[int] = []  # of the turns, among the tokens of all trajectories
    end = 0
    for n, summary in enumerate(summaries):
        start, end = end + summary.prompt, end + summary.length
        for turn in summary.turns:
            starts.append(start)
            start += turn.tokens + turn.observation
        turns += summary.turns
        turn_to_sequence += [n] * len(summary.turns)

    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    tokens_S, none = column(turn.tokens for turn in turns), column([])
    turn_offsets = _offsets(tokens_S)
    reward_T = torch.zeros(len(rollout_logprob_T))
    reward_T[turn_offsets[1:] - 1] = torch.tensor([turn.reward for turn in turns], dtype=torch.float32)
    action_index_T = _rows(column(starts), tokens_S)
    assert len(action_index_T) == len(rollout_logprob_T)
    runs = [run for turn in turns for run in turn.versions]
    return Batch(
        tokens_P=none,
        held_N=torch.full((len(summaries),), -1),
        sequence_offsets=_offsets(column(summary.length for summary in summaries)),
        turn_offsets=turn_offsets,
        turn_to_sequence_S=column(turn_to_sequence),
        action_offsets=_offsets(column(sum(turn.tokens for turn in s.turns) for s in summaries)),
        action_index_T=action_index_T,
        live_N=torch.tensor([s.outcome not in FAILED and bool(s.turns) for s in summaries]),
        rollout_logprob_T=rollout_logprob_T,
        version_T=column(v for v, _ in runs).repeat_interleave(column(count for _, count in runs)),
        reward_T=reward_T,
        first_N=torch.tensor([s.branch == 0 for s in summaries])
        if any(s.branch for s in summaries)
        else None,
        cut_N=torch.tensor([s.outcome == "truncated" for s in summaries])
        if any(s.outcome == "truncated" for s in summaries)
        else None,
        state_S=column(turn.state for turn in turns),
    )


def holding(batch: Batch, held: Sequence[int], tokens_P: Tensor) -> Batch:
    """Return the batch with the tokens of the trajectories `held`, which ascend, one after another."""
    index = torch.tensor(held, dtype=torch.int64)
    offsets = _offsets(batch.sequence_offsets.diff()[index])
    assert len(tokens_P) == int(offsets[-1]), (len(tokens_P), offsets)
    held_N = torch.full_like(batch.held_N, -1).index_copy(0, index, offsets[:-1])
    return replace(batch, tokens_P=tokens_P, held_N=held_N)


def groups_of(summaries: Sequence[Summary]) -> Tensor:
    """Return the group of each trajectory, int64 [N]: an equal number for trajectories of one task."""
    return torch.tensor([summary.group for summary in summaries])


def pack(
    batch: Batch,
    chosen: Sequence[int],
    spec: PackingSpec,
    device: torch.device | str | int = "cpu",
    tree: Tree | None = None,
) -> list[Microbatch]:
    """Return the microbatches of the chosen trajectories, which the rank must hold; `unpack` restores the
    Batch's order. tree: that of the chosen trajectories, if it is known."""
    tree = prefixes_of(batch, chosen, spec) if tree is None else tree
    runs = microbatch_runs(tree, spec)
    cut = [tree.packed(run) for run in runs]
    padded = [_padded(one, spec) for one in cut]
    if spec.equal:
        least = max(int(x.sum()) for x in padded) // spec.context_size
        padded = [_padded(one, spec, least) for one in cut]
    return [
        _pack_one(batch, [chosen[i] for i in run], one, own, spec, device)
        for run, one, own in zip(runs, cut, padded, strict=True)
    ]


def prefixes_of(
    batch: Batch, chosen: Sequence[int], spec: PackingSpec, marks_P: Tensor | None = None
) -> Tree:
    """Return the prefix tree of the chosen trajectories, which the rank must hold if prefixes are shared.

    marks_P: see Tree.of.
    """
    if spec.share_prefixes:
        return Tree.of(batch, chosen, marks_P)
    return Tree.plain(batch.sequence_offsets.diff()[torch.as_tensor(chosen, dtype=torch.int64)].tolist())


def microbatch_runs(tree: Tree, spec: PackingSpec) -> list[list[int]]:
    """Return the places of each microbatch's trajectories among those of the tree; an empty list for a
    microbatch of dummy tokens."""
    runs = tree.bins(spec.budget * spec.context_size)
    return runs + [[]] * (-len(runs) % spec.in_step)


def _padded(cut: Segments, spec: PackingSpec, least: int = 1) -> Tensor:
    return context.padded_lengths(cut.lengths, spec.context_size, spec.multiple, least)


def _pack_one(
    batch: Batch,
    run: Sequence[int],
    cut: Segments,
    padded: Tensor,
    spec: PackingSpec,
    device: torch.device | str | int,
) -> Microbatch:
    index = torch.tensor(run, dtype=torch.int64)
    lengths, counts = batch.sequence_offsets.diff()[index], batch.action_offsets.diff()[index]
    rows_P, rows_T = rows_of(batch, index), _rows(batch.action_offsets[index], counts)
    turns = torch.cat([torch.nonzero(batch.turn_to_sequence_S == i).squeeze(1) for i in run] or [index])
    offsets, starts = _offsets(padded), _offsets(lengths)[:-1]
    # moved_P: the place of each token of the trajectories among the padded tokens
    gaps = offsets[: len(cut.lengths)] - _offsets(cut.lengths)[:-1]
    moved_P = cut.places + torch.repeat_interleave(gaps, cut.lengths)[cut.places]
    tokens = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    # padding continues its sequence
    position = torch.arange(len(tokens)) - torch.repeat_interleave(offsets[:-1], padded)
    tokens[moved_P], position[moved_P] = batch.tokens_P[rows_P], _rows(torch.zeros_like(index), lengths)
    # of equal tokens the first; -1: a dummy
    origin = torch.full_like(tokens, -1).scatter_reduce(0, moved_P, rows_P, "amin", include_self=False)
    mine, local = context.share(padded, spec.context_rank, spec.context_size)
    start_of_rows = torch.repeat_interleave(starts - batch.sequence_offsets[index], counts)
    acting = batch.action_index_T[rows_T] + start_of_rows
    predicting, target = moved_P[acting - 1], tokens[moved_P[acting]]
    here_T = local[predicting] >= 0
    whole_turns, whole_actions = _offsets(batch.turn_offsets.diff()[turns]), _offsets(counts)
    before = _offsets(here_T.long())  # how many of the first t action tokens are here
    rows_T = rows_T[here_T]
    again = origin[moved_P] != rows_P

    columns = (tokens[mine], position[mine], local[predicting[here_T]], target[here_T], offsets)
    # one copy to the device instead of five
    moved = to_device(torch.cat(columns), device).split([len(column) for column in columns])
    tokens_P, position_P, hidden_index_T, target_T, sequence_offsets = moved
    return Microbatch(
        tokens_P=tokens_P,
        position_P=position_P,
        sequence_offsets=sequence_offsets.int(),
        lengths=padded,
        hidden_index_T=hidden_index_T,
        target_T=target_T,
        turn_offsets=before[whole_turns],
        action_offsets=before[whole_actions],
        whole_turn_offsets=whole_turns,
        whole_action_offsets=whole_actions,
        rows_T=rows_T,
        rows_P=origin[mine],
        routes_P=None if batch.routes_P is None else to_device(_routes(batch.routes_P, origin[mine]), device),
        longest=int(torch.cat([padded, lengths]).max()),
        keys=cut.keys,
        repeated=torch.stack([rows_P, origin[moved_P]])[:, again] if cut.keys is not None else None,
    )


def _routes(routes_P: Tensor, origin: Tensor) -> Tensor:
    """Return the recorded experts of packed tokens, int16 [P, layers, k].

    They are -1 where the router chooses: for unknown experts (routes.py), and where `origin` is -1.

    The router chooses the experts of a dummy token in a replayed pass as in any other pass. Other experts
    would change the number of rows that an expert multiplies, and on some CPUs the last bits of live rows.
    """
    if not len(routes_P):  # no episode of this rank has a token, so the only one here is a dummy
        routes_P = routes_P.new_zeros(1, *routes_P.shape[1:])
    routes = routes_P[origin.clamp(min=0)]
    chooses = (routes == unknown(routes.dtype)) | (origin < 0)[:, None, None]
    return routes.short().masked_fill(chooses, -1)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def rows_of(batch: Batch, chosen: Sequence[int] | Tensor) -> Tensor:
    """Return the rows in P of the chosen trajectories, one after another. This rank must hold them."""
    index = torch.as_tensor(chosen, dtype=torch.int64)
    assert bool((batch.held_N[index] >= 0).all()), "the tokens of these trajectories are on other ranks"
    return _rows(batch.held_N[index], batch.sequence_offsets.diff()[index])


def _rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows of slices, one slice after another. Example: starts [4, 0], lengths [2, 3] give
    [4, 5, 0, 1, 2]."""
    rows = torch.arange(int(lengths.sum()))
    return rows.add_(torch.repeat_interleave(starts - _offsets(lengths)[:-1], lengths))


def unpack(microbatches: Sequence[Microbatch], values: Sequence[Tensor], total: int) -> Tensor:
    """Return the values [T_i] of all microbatches in the rows of the Batch: float32 [total] on the host, zero
    elsewhere."""
    out = torch.zeros(total)
    if microbatches:
        together = torch.cat([value.detach().float() for value in values])  # so that the host waits once
        out[torch.cat([microbatch.rows_T for microbatch in microbatches])] = together.cpu()
    return out
