"""Checks that a reward arrives at the last action token of its turn, and at no other token, and the tokens of
an episode at the ranks that train on it.

Every turn gets a number of its own, with a sign and a fraction. A function that environment.reward names must
get the turns of its episode and replace its reward. What follows from rewards is for checks/advantages.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, count
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_stppo.base.types import FAILED, DividedBatch, Summary, Trajectory
from megatron_stppo.data.exchange import Played, deal
from megatron_stppo.data.packing import rows_of, token_ids
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless, first_wrong, of_every_rank
from megatron_stppo.training.stages import distribute

LAND = "rewards land"
Rewards = Sequence[Sequence[float]]  # of every turn of every trajectory
T = TypeVar("T", Summary, Trajectory)


def landing(stage: Stage) -> Iterator[Checked]:
    """Compare the rewards of the episodes, and of planted ones, with those of their tokens. Collective."""
    number = count(-20.75)  # of both signs; none is whole
    rewards = [[next(number) for _ in summary.turns] for summary in stage.played.every]
    played = rewarded(stage.played, rewards)
    batch = distribute(stage.learner, played, 0)
    wrong, known = _credited(stage), sum(stage.record(n) is not None for n in range(len(stage.episodes)))
    wrong += of_every_rank(_misplaced(stage, batch))
    wrong += first_wrong("planted reward", batch.reward_T.tolist(), _at_ends(played.every))
    lengths = [[turn.tokens for turn in summary.turns] for summary in played.every]
    for name, offsets, counts in (
        ("end of a turn", batch.turn_offsets, chain.from_iterable(lengths)),
        ("end of a history", batch.action_offsets, map(sum, lengths)),
    ):
        wrong += first_wrong(name, offsets.tolist(), list(accumulate(counts, initial=0)))
    text = f"{len(batch.reward_T):,} action tokens of {len(played.every)} episodes"
    remedy = "environment: report this line; a reward is credited to tokens that did not earn it"
    yield faultless(LAND, wrong, f"{text} (rewards of {known} compared with the environment's)", remedy)


def rewarded(played: Played, rewards: Rewards) -> Played:
    """Return the episodes with these rewards."""

    def changed(number: int, episode: T) -> T:
        turns = zip(episode.turns, rewards[number], strict=True)
        return replace(episode, turns=tuple(replace(turn, reward=reward) for turn, reward in turns))

    first = sum(played.counts[: dist.get_rank()])
    every = [changed(n, summary) for n, summary in enumerate(played.every)]
    return replace(played, every=every, own=[changed(first + n, t) for n, t in enumerate(played.own)])


def _credited(stage: Stage) -> list[str]:
    """Return where the episodes have other rewards than their environments gave, or the batch has others
    than the episodes."""
    wrong = list[str]()
    for n, trajectory in enumerate(stage.episodes):
        record = stage.record(n)
        if record is None or trajectory.outcome in FAILED:
            continue
        ignored = stage.config.environment.reward is not None and record.outcome and record.graded is None
        if record.misgraded or ignored:
            wrong.append(f"episode {n}: environment.reward {record.misgraded or 'is not called'}"[:200])
        unanswered = [0.0] * (len(trajectory.turns) - len(record.rewards))
        rewards = [turn.reward for turn in trajectory.turns]
        if rewards != [*record.rewards, *unanswered]:
            wrong.append(f"episode {n}: rewards {rewards}, and its environment gave {record.rewards}")
    at_ends = _at_ends([trajectory.summary for trajectory in stage.episodes])
    return wrong + first_wrong("reward", stage.batch.reward_T.tolist(), at_ends)


def _misplaced(stage: Stage, batch: DividedBatch) -> list[str]:
    """Return which tokens this rank has otherwise than they were played: those that it holds, and those of
    all episodes, after the data-parallel ranks have dealt them out again. Collective."""
    mesh, every = stage.learner.mesh, range(len(stage.episodes))
    held = [n for n in every if batch.held_N[n] >= 0]
    given = [sorted(chain(*(m.parts[r] for m in batch.epochs[0]))) for r in range(mesh.data_size)]
    own_P = batch.tokens_P[rows_of(batch, given[mesh.data_rank])]
    dealt_P = deal(own_P, batch, given, [every] * mesh.data_size, mesh.data_group)
    right = torch.equal(
        batch.tokens_P[rows_of(batch, held)].cpu(), token_ids([stage.episodes[n] for n in held])
    )
    right = right and torch.equal(dealt_P.cpu(), token_ids(stage.episodes))
    return (
        [] if right else ["tokens of other episodes, or in another order, are on a rank that trains on them"]
    )


def _at_ends(every: Sequence[Summary]) -> list[float]:
    """Return the rewards of the action tokens: those of the turns, at their last tokens."""
    of_turns = ([0.0] * (turn.tokens - 1) + [turn.reward] for summary in every for turn in summary.turns)
    return torch.tensor([*chain.from_iterable(of_turns)]).tolist()  # float32, as in a batch
