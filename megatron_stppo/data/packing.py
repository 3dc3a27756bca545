"""Packs trajectories into a batch, and a batch into microbatches by token budget; unpacks the results."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_stppo.base.types import FAILED, Batch, BatchT, Summary, Trajectory, TurnSummary
from megatron_stppo.data import context
from megatron_stppo.data.prefixes import Segments, Tree
from megatron_stppo.data.routes import of_rows
from megatron_stppo.ops.extension import to_device


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
    ids = itertools.chain.from_iterable(t.token_ids for t in trajectories)
    return torch.from_numpy(np.fromiter(ids, dtype=np.int64))  # torch.tensor takes four times as long


def rollout_logprobs(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the engine's log-probs of the action tokens, float32 [T]."""
    given = itertools.chain.from_iterable(turn.rollout_logprob for t in trajectories for turn in t.turns)
    return torch.from_numpy(np.fromiter(given, dtype=np.float32))


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
        first_N=torch.tensor([s.branch == 0 for s in summaries]),
        cut_N=torch.tensor([s.outcome == "truncated" for s in summaries]),
        state_S=column(turn.state for turn in turns),
    )


def holding(batch: BatchT, held: Sequence[int], tokens_P: Tensor) -> BatchT:
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
) -> Sequence[Microbatch]:
    """Return the microbatches of the chosen trajectories, which the rank must hold; `unpack` restores the
    Batch's order. tree: that of the chosen trajectories, if it is known."""
    tree = prefixes_of(batch, chosen, spec) if tree is None else tree
    runs = microbatch_runs(tree, spec)
    # the interleaved schedule needs the length of all before the first
    sums = (int(_padded(tree.packed(run), spec).sum()) for run in runs if spec.equal)
    least = max((tokens // spec.context_size for tokens in sums), default=1)

    def make(n: int) -> Microbatch:
        cut = tree.packed(runs[n])
        return _pack_one(batch, [chosen[i] for i in runs[n]], cut, _padded(cut, spec, least), spec, device)

    return routed(OnDemand(make, len(runs)), batch.routes_P, device)


class OnDemand(Sequence[Microbatch]):
    """Microbatches, each of which is made when it is first read, and then kept.

    So the first runs on a GPU while the host makes the second.
    """

    def __init__(self, make: Callable[[int], Microbatch], count: int) -> None:
        self._make = make
        self._made: list[Microbatch | None] = [None] * count

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, n: int) -> Microbatch:  # type: ignore[override]  # no slices
        self._made[n] = made = self._made[n] or self._make(n)
        return made


def routed(
    microbatches: Sequence[Microbatch], routes_P: Tensor | None, device: torch.device | str | int
) -> Sequence[Microbatch]:
    """Return the microbatches with the recorded experts of the Batch; None: the router chooses all."""
    if routes_P is None:
        return microbatches

    def make(n: int) -> Microbatch:
        one = microbatches[n]
        return replace(one, routes_P=to_device(of_rows(routes_P, one.rows_P), device))

    return OnDemand(make, len(microbatches))


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
    lengths = torch.from_numpy(cut.lengths)
    return context.padded_lengths(lengths, spec.context_size, spec.multiple, least)


def _pack_one(
    batch: Batch,
    run: Sequence[int],
    cut: Segments,
    padded: Tensor,
    spec: PackingSpec,
    device: torch.device | str | int,
) -> Microbatch:
    # with numpy, whose indexing of a few thousand elements is several times as fast as torch's
    index, array = np.array(run, dtype=np.int64), torch.from_numpy
    sequence_offsets, action_offsets, owner_S = (
        x.numpy() for x in (batch.sequence_offsets, batch.action_offsets, batch.turn_to_sequence_S)
    )
    lengths, counts = (x[index + 1] - x[index] for x in (sequence_offsets, action_offsets))
    rows_P, rows_T = rows_of(batch, run).numpy(), _slices(action_offsets[index], counts)
    first = np.searchsorted(owner_S, index)  # turns are ordered by trajectory
    turns = _slices(first, np.searchsorted(owner_S, index, "right") - first)
    offsets, starts = _edges(padded.numpy()), _edges(lengths)[:-1]
    # moved_P: the place of each token of the trajectories among the padded tokens
    gaps = offsets[: len(cut.lengths)] - _edges(cut.lengths)[:-1]
    moved_P = cut.places + np.repeat(gaps, cut.lengths)[cut.places] if gaps.any() else cut.places
    tokens = np.zeros(offsets[-1], dtype=np.int64)
    # padding continues its sequence
    position = _slices(np.zeros_like(offsets[:-1]), padded.numpy())
    tokens[moved_P] = batch.tokens_P.numpy()[rows_P]
    position[moved_P] = _slices(np.zeros_like(index), lengths)
    # of equal tokens the first; -1: a dummy
    origin = np.full_like(tokens, len(batch.tokens_P))
    np.minimum.at(origin, moved_P, rows_P)
    origin[origin == len(batch.tokens_P)] = -1
    mine, local = (x.numpy() for x in context.share(padded, spec.context_rank, spec.context_size))
    acting = batch.action_index_T.numpy()[rows_T] + np.repeat(starts - sequence_offsets[index], counts)
    predicting, target = local[moved_P[acting - 1]], tokens[moved_P[acting]]
    here_T = predicting >= 0
    turn_lengths = batch.turn_offsets.numpy()[turns + 1] - batch.turn_offsets.numpy()[turns]
    whole_turns, whole_actions = _edges(turn_lengths), _edges(counts)
    before = _edges(here_T)  # how many of the first t action tokens are here
    rows_of_mine, repeats = origin[mine], origin[moved_P]
    again = repeats != rows_P

    columns = (tokens[mine], position[mine], predicting[here_T], target[here_T], offsets)
    # one copy to the device instead of five
    moved = to_device(array(np.concatenate(columns)), device).split([len(column) for column in columns])
    tokens_P, position_P, hidden_index_T, target_T, moved_offsets = moved
    return Microbatch(
        tokens_P=tokens_P,
        position_P=position_P,
        sequence_offsets=moved_offsets.int(),
        lengths=padded,
        hidden_index_T=hidden_index_T,
        target_T=target_T,
        turn_offsets=array(before[whole_turns]),
        action_offsets=array(before[whole_actions]),
        whole_turn_offsets=array(whole_turns),
        whole_action_offsets=array(whole_actions),
        rows_T=array(rows_T[here_T]),
        rows_P=array(rows_of_mine),
        longest=max(int(x.max(initial=0)) for x in (padded.numpy(), lengths)),
        keys=None if cut.keys is None else (array(cut.keys[0]), array(cut.keys[1])),
        repeated=None if cut.keys is None else array(np.stack([rows_P[again], repeats[again]])),
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _edges(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def rows_of(batch: Batch, chosen: Sequence[int] | Tensor) -> Tensor:
    """Return the rows in P of the chosen trajectories, one after another. This rank must hold them."""
    index = torch.as_tensor(chosen, dtype=torch.int64)
    assert bool((batch.held_N[index] >= 0).all()), "the tokens of these trajectories are on other ranks"
    return _rows(batch.held_N[index], batch.sequence_offsets.diff()[index])


def _rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows of slices, one slice after another. Example: starts [4, 0], lengths [2, 3] give
    [4, 5, 0, 1, 2]."""
    return torch.from_numpy(_slices(starts.numpy(), lengths.numpy()))


def _slices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """As `_rows`, with numpy."""
    return np.arange(lengths.sum()) + np.repeat(starts - _edges(lengths)[:-1], lengths)


def unpack(microbatches: Sequence[Microbatch], values: Sequence[Tensor], total: int) -> Tensor:
    """Return the values [T_i] of all microbatches in the rows of the Batch: float32 [total] on the host, zero
    elsewhere."""
    out = torch.zeros(total)
    if microbatches:
        together = torch.cat([value.detach().float() for value in values])  # so that the host waits once
        out[torch.cat([microbatch.rows_T for microbatch in microbatches])] = together.cpu()
    return out
