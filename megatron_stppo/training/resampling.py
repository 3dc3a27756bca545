"""Colocated rollouts: a ledger (data/ledger.py) with staleness 0, whose episodes the trainer's ranks play."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from megatron_stppo.base.types import Summary, Task, Trajectory
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.ledger import Ledger, Terms, without_variance
from megatron_stppo.parallel.collectives import all_to_all, decode, encode, gather_records

NO_TASK = Task("", (), (), "", 0)


def resampled(
    take: Callable[[int], list[Task]], play: Callable[[Sequence[Task], int], Played], terms: Terms
) -> Played:
    """Play the groups of a batch, and others in the place of those that dynamic sampling drops.

    Collective. The batch has the groups with variance and all groups of the last round, in the order in which
    they were played. Played.dropped has the other groups; it is None if none may be dropped.

    take: returns the next tasks. play: plays the groups of tasks, whose first has the given number.
    Example: 4 tasks per batch, resample=1; of the groups 0 to 3, group 1 has no variance, and group 4 is
    played in its place. The batch has groups 0, 2, 3 and 4, also if group 4 has no variance, as its groups 0,
    1, 2 and 3.
    """
    ledger, tasks, played, dropped = Ledger(terms), list[Task](), list[Played](), list[Summary]()
    new = ledger.admit(0)
    while new:
        drawn = take(len(new))
        played.append(play(drawn, len(tasks)))
        tasks += drawn
        for group in new:
            ledger.complete(group.number)
        flat = without_variance(played[-1].every).intersection(ledger.droppable())
        dropped += [summary for summary in played[-1].every if summary.group in flat]
        played[-1] = without_groups(played[-1], flat)
        new = ledger.replace(sorted(flat))
    batch = in_one(played, tasks) if dropped else played[0]
    return replace(batch, dropped=dropped if terms.resample else None)


def without_groups(played: Played, groups: set[int]) -> Played:
    """Return the rollout without some of its groups."""
    ends = [0, *accumulate(played.counts)]
    of_rank = [played.every[first:last] for first, last in pairwise(ends)]
    left = [[summary for summary in of_one if summary.group not in groups] for of_one in of_rank]
    return Played(
        [summary for of_one in left for summary in of_one],
        [trajectory for trajectory in played.own if trajectory.group not in groups],
        [len(of_one) for of_one in left],
    )


def in_one(rollouts: Sequence[Played], tasks: Sequence[Task]) -> Played:
    """Return one rollout of all trajectories, with the groups 0, 1, ... in the order of their numbers.

    Collective. Trajectories are in the order of the rollouts, and each rank gets an equal part of them. The
    order, which decides their minibatches, does not depend on the number of ranks.

    rollouts: with different groups, ascending from one rollout to the next. tasks: by the number of the
    group; every rank has them, so they are not sent.
    Example: two ranks, of which rank 0 has the trajectories a, b of the first rollout and e of the second,
    and rank 1 has c, d, f and g: rank 0 gets a, b, c, and rank 1 gets d, e, f, g.
    """
    every = [summary for rollout in rollouts for summary in rollout.every]
    number = {group: place for place, group in enumerate(sorted({summary.group for summary in every}))}
    world, rank = dist.get_world_size(), dist.get_rank()
    cuts = [len(every) * r // world for r in range(world + 1)]
    target = [r for r in range(world) for _ in range(cuts[r], cuts[r + 1])]
    owner = [r for rollout in rollouts for r, count in enumerate(rollout.counts) for _ in range(count)]
    own = iter([trajectory for rollout in rollouts for trajectory in rollout.own])
    sent: list[list[Trajectory]] = [[] for _ in range(world)]
    for source, destination in zip(owner, target, strict=True):
        if source == rank:
            sent[destination].append(replace(next(own), task=NO_TASK))
    received = [iter(of_rank) for of_rank in _exchanged(sent)]
    mine = [next(received[source]) for source, to in zip(owner, target, strict=True) if to == rank]
    return Played(
        [replace(summary, group=number[summary.group]) for summary in every],
        [replace(t, task=tasks[t.group], group=number[t.group]) for t in mine],
        [last - first for first, last in pairwise(cuts)],
    )


def _exchanged(sent: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """Send sent[r] to rank r, and return what each rank has sent to this one. Collective."""
    payloads = [encode(list(of_rank)) for of_rank in sent]
    sizes = [row for (row,) in gather_records([[len(payload) for payload in payloads]], list[int])]
    to_me = [of_rank[dist.get_rank()] for of_rank in sizes]
    body = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
    got = all_to_all(body, [len(payload) for payload in payloads], to_me).cpu()
    return [decode(part.numpy().tobytes(), list[Trajectory]) for part in got.split(to_me)]
