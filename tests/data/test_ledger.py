"""The ledger of groups; groups without variance are those whose group-relative advantages are all 0."""

from __future__ import annotations

import math

from megatron_stppo.base.types import Outcome, Summary, TurnSummary
from megatron_stppo.data.ledger import Admitted, Ledger, Taken, Terms, without_variance


def test_a_ledger_continues_after_groups_that_were_dropped() -> None:
    """After two batches of 2 groups and one dropped group, the next number is 5."""
    book = Ledger(Terms(2, resample=1), iteration=2, drops=1, extra=1)
    assert book.admit(2) == [Admitted(5, 2, 0), Admitted(6, 2, 1)]
    assert book.droppable() == []  # not completed
    book.complete(6)
    book.complete(5)
    assert book.replace([number for number in book.droppable() if number == 5]) == [Admitted(7, 2, 2)]
    assert (book.droppable(), book.take()) == ([], None)
    book.complete(7)
    assert book.take() == Taken([6, 7], [[5]])
    assert book.admit(3) == [Admitted(8, 3, 0), Admitted(9, 3, 1)]


def test_a_batch_that_is_put_back_is_the_next_one_and_its_dropped_groups_are_open() -> None:
    book = Ledger(Terms(1, max_staleness=1, order="completion", resample=1))
    book.admit(0)
    for number in (1, 0):
        book.complete(number)
    book.replace([1])
    taken = book.take()
    assert (taken, book.drops) == (Taken([0], [[1]]), 1)
    book.put_back(taken)
    assert (list(book.open), book.completed, book.drops) == ([0, 1, 2], [1, 0], 0)


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
