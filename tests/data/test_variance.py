"""Groups without variance are those whose group-relative advantages are all 0."""

from __future__ import annotations

import math

from megatron_stppo.base.types import Outcome, Summary, TurnSummary
from megatron_stppo.data.ledger import without_variance


def episode(group: int, reward: float, outcome: Outcome = "ok", branch: int = 0) -> Summary:
    turns = (TurnSummary(2, 0, 0.0, ((0, 2),)), TurnSummary(1, 0, reward, ((0, 1),)))
    return Summary(0, 3, turns, outcome, group, 0, 2, "", 0, branch)


def test_groups_of_equal_outcomes_have_no_variance() -> None:
    played = [episode(7, 0.0), episode(7, 1.0), episode(3, 1.0), episode(3, 1.0), episode(5, 0.1)]
    assert without_variance(played) == {3, 5}
    assert without_variance([]) == set()


def test_failed_episodes_are_not_compared() -> None:
    played = [episode(0, 1.0), episode(0, 1.0), episode(0, 0.0, "timeout")]
    played += [episode(1, 1.0), episode(1, 0.0, "error"), episode(2, 0.0, "error"), episode(2, 0.0, "error")]
    played += [episode(3, 1.0), episode(3, 0.0, "wrong"), episode(3, 0.5, "error")]
    assert without_variance(played) == {0, 1, 2}


def test_an_episode_with_several_histories_counts_once() -> None:
    # with three rewards of 0.1 the mean would be rounded; what counts are the two first histories
    played = [episode(0, 0.1), episode(0, 0.1, branch=1), episode(0, 0.1), episode(1, 0.0)]
    played += [episode(1, 0.0, branch=1), episode(1, 1.0)]
    assert without_variance(played) == {0}


def test_a_reward_that_is_not_a_number_is_not_hidden() -> None:
    assert without_variance([episode(0, math.nan), episode(0, 1.0)]) == set()
