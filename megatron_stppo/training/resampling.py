"""Dynamic sampling on the trainer's own ranks (DAPO, arXiv 2503.14476, section 3.2).

A group of episodes without variance gives a group-relative advantage of 0. Such groups are dropped, and
groups of the next tasks are played in their place. replicas/trainer/ledger.py makes the same decisions in
asynchronous training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_stppo.base.types import Summary, Task
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.rounds import in_one, without_groups
from megatron_stppo.data.variance import without_variance


def resampled(
    take: Callable[[int], list[Task]], play: Callable[[Sequence[Task], int], Played], count: int, rounds: int
) -> Played:
    """Play groups of episodes until `count` of them have variance, or `rounds` further rounds are over.

    Collective. The batch has the groups with variance and all groups of the last round, in the order in which
    they were played. Played.dropped has the other groups.

    take: returns the next tasks. play: plays the groups of tasks, whose first has the given number.
    Example: count=4, rounds=1; of the groups 0 to 3, group 1 has no variance, and group 4 is played in its
    place. The batch has groups 0, 2, 3 and 4, also if group 4 has no variance, as its groups 0, 1, 2 and 3.
    """
    tasks = take(count)
    played, dropped = [play(tasks, 0)], list[Summary]()
    while len(played) <= rounds and (flat := without_variance(played[-1].every)):
        dropped += [summary for summary in played[-1].every if summary.group in flat]
        played[-1] = without_groups(played[-1], flat)
        new = take(len(flat))
        played.append(play(new, len(tasks)))
        tasks += new
    return replace(in_one(played, tasks) if dropped else played[0], dropped=dropped if rounds else None)
