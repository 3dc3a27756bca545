"""Dynamic sampling of colocated rollouts: which groups are in the batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.base.types import Summary, Task, Trajectory, Turn, TurnSummary
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.observe.describe import describe_groups
from tests.ranks import run_ranks

TASKS = tuple(Task("t", (), ("a",), "train", index, {"kept": (1, 2)}) for index in range(30))
SAMPLES = 2


def played(task: Task, group: int, sample: int, flat: Sequence[int]) -> Trajectory:
    """The second episode of a group gets the reward 1, the first gets 0, or 1 in a `flat` group."""
    number = group * SAMPLES + sample
    reward = 1.0 if sample or group in flat else 0.0
    turn = Turn((number, 7), (-0.5, -0.25), (), reward, ((0, 2),))
    return Trajectory(task, (number,) * (1 + number % 3), (turn,), "ok", group)


def draw(flat: Sequence[int], rounds: int) -> dict[str, Any]:
    """Return this rank's part of a batch of 4 groups, and which groups were played in each round."""
    from megatron_stppo.data.exchange import Played
    from megatron_stppo.data.ledger import Terms
    from megatron_stppo.training.rollouts import resampled

    cursor, asked = TaskCursor(TASKS, seed=0), []

    def play(tasks: Sequence[Task], first: int) -> Played:
        asked.append((first, len(tasks)))
        groups = list(enumerate(tasks, first))
        every = [played(task, group, sample, flat) for group, task in groups for sample in range(SAMPLES)]
        cuts = [len(every) * r // dist.get_world_size() for r in range(dist.get_world_size() + 1)]
        return Played.of(every[cuts[dist.get_rank()] : cuts[dist.get_rank() + 1]])

    batch = resampled(cursor.take, play, Terms(4, SAMPLES, resample=rounds))
    return {"batch": batch, "asked": asked, "next": cursor.take(1)[0].index}


CASES: list[tuple[Sequence[int], int, list[tuple[int, int]], list[int]]] = [
    # groups without variance, rounds, (first group, groups) of each round that is played, groups of the batch
    ([], 2, [(0, 4)], [0, 1, 2, 3]),
    ([1], 1, [(0, 4), (4, 1)], [0, 2, 3, 4]),
    ([1, 4], 1, [(0, 4), (4, 1)], [0, 2, 3, 4]),  # the last round is in the batch
    ([0, 3, 4], 2, [(0, 4), (4, 2), (6, 1)], [1, 2, 5, 6]),
    (range(30), 2, [(0, 4), (4, 4), (8, 4)], [8, 9, 10, 11]),
]


def draw_all() -> list[dict[str, Any]]:
    return [draw(flat, rounds) for flat, rounds, _, _ in CASES]


@pytest.mark.parametrize("ranks", [1, 3])
def test_groups_without_variance_are_replaced_by_those_of_the_next_tasks(ranks: int) -> None:
    """Nothing that is expected here depends on the number of ranks."""
    drawn = TaskCursor(TASKS, seed=0).take(13)
    of_ranks = run_ranks(draw_all, ranks)
    for (_, _, asked, groups), found in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        own = [trajectory for one in found for trajectory in one["batch"].own]
        expected = [(drawn[group], place) for place, group in enumerate(groups) for _ in range(SAMPLES)]
        assert [(t.task, t.group) for t in own] == expected, (
            "the tasks are complete, also of those that moved"
        )
        assert [t.turns[0].token_ids[0] // SAMPLES for t in own] == [
            g for g in groups for _ in range(SAMPLES)
        ]
        count = sum(many for _, many in asked)
        left = [g for g in range(count) if g not in groups for _ in range(SAMPLES)]
        for one in found:
            assert (one["asked"], one["next"]) == (asked, drawn[count].index)
            assert one["batch"].every == [trajectory.summary for trajectory in own]
            assert one["batch"].counts == [len(other["batch"].own) for other in found]
            assert [summary.group for summary in one["batch"].dropped] == left


def test_without_rounds_nothing_is_dropped() -> None:
    (found,) = run_ranks(draw, 1, [1, 2], 0)
    assert found["batch"].dropped is None
    assert [t.group for t in found["batch"].own] == [0, 0, 1, 1, 2, 2, 3, 3]


def episode(group: int, reward: float) -> Summary:
    return Summary(0, 1, (TurnSummary(1, 0, reward, ((0, 1),)),), "ok", group, 0, 1, "", 0)


def test_the_row_has_the_cost_and_the_bias_of_dynamic_sampling() -> None:
    trained = [episode(0, 0.0), episode(0, 1.0), episode(1, 1.0), episode(1, 0.0)]
    dropped = [episode(1, 1.0), episode(1, 1.0)]  # numbers of their own
    assert describe_groups(trained) == {"rollout/without_variance": 0}
    assert describe_groups(trained, dropped) == {
        "rollout/without_variance": 1 / 3,
        "rollout/resampled": 1,
        "rollout/played_per_trained": 6 / 4,
        "rollout/reward_all": 4 / 6,
    }
    at_the_bound = describe_groups([*dropped, *trained[:2]], [])
    assert at_the_bound["rollout/without_variance"] == 1 / 2
    assert describe_groups([episode(0, 1.0), episode(1, 0.0)]) == {}, "one episode per task has no groups"
