"""Colocated rollouts: a ledger (data/ledger.py) with staleness 0, whose episodes the trainer's ranks play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_stppo.base.types import Summary, Task
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.ledger import Ledger, Terms, without_variance
from megatron_stppo.data.rounds import in_one, without_groups


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
