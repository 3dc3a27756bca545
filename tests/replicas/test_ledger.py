"""The ledger: admission, batches in both orders, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stppo.base.types import Outcome, Task, Trajectory, Turn
from megatron_stppo.config import ConfigError
from megatron_stppo.data.ledger import Order, Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.wire.episodes import decode_episodes, encode_episodes

TASKS = tuple(Task("test", (), ("yes",), "train", index) for index in range(7))
ELSEWHERE = Task("other", (), ("no",), "train", 99)


def ledger(tasks: int = 2, samples: int = 1, staleness: int = 1, order: Order = "admission") -> EpisodeLedger:
    return EpisodeLedger(TaskCursor(TASKS, seed=0), Terms(tasks, samples, staleness, order))


def played(number: int, tokens: int = 0, outcome: Outcome = "ok") -> Trajectory:
    """Return an episode with one turn, or one without turns."""
    turn = Turn((7,) * tokens, (-0.5,) * tokens, (), 0.0, ((0, tokens),)) if tokens else None
    return Trajectory(ELSEWHERE, (number,), (turn,) if turn else (), outcome)


def numbers(batch: list[Trajectory] | None) -> list[int]:
    assert batch is not None
    return [trajectory.prompt_ids[0] for trajectory in batch]


def test_a_bound_of_l_admits_l_further_batches() -> None:
    for staleness in (0, 1, 3):
        book = ledger(tasks=2, samples=3, staleness=staleness)
        assert [a.number for a in book.admit(0)] == list(range(6 * (staleness + 1)))
        assert book.admit(0) == []  # a repeated call admits nothing
        assert len(book.admit(1)) == 6


def test_episodes_have_the_seeds_and_places_of_the_colocated_run() -> None:
    book = EpisodeLedger(TaskCursor(TASKS, 0), Terms(2, 2, 1), seed=5)
    admitted = book.admit(0)
    assert [(a.seed, a.place, a.group) for a in admitted[:4]] == [
        (5_000_015, place, group) for place, group in ((0, 0), (1, 0), (2, 1), (3, 1))
    ]
    assert (admitted[4].seed, admitted[4].place) == (5_000_016, 0)  # the first of iteration 1
    drawn = TaskCursor(TASKS, 0).take(4)
    assert [a.task for a in admitted] == [task for task in drawn for _ in range(2)]


def test_a_batch_waits_for_its_slowest_episode_and_has_the_order_of_admission() -> None:
    book = ledger()
    book.admit(0)
    for number in (3, 2, 1):
        assert book.finish(number, played(number))
    assert (book.batch(), book.ready) == (None, 3)
    book.finish(0, played(0))
    assert numbers(book.batch()) == [0, 1] and numbers(book.batch()) == [2, 3]


def test_the_length_bias_compares_with_what_order_of_admission_would_have_trained_on() -> None:
    book = ledger(order="completion")
    book.admit(0)  # 0 to 3
    assert book.bias() == {"overtaken": 0, "length_bias": 0.0}
    for number, tokens in ((3, 2), (1, 4)):
        book.finish(number, played(number, tokens))
    assert numbers(book.batch()) == [3, 1]
    # 0 and 1 would be in the first batch, but 0 has not finished: (2 + 4) / 2 - 4 / 1
    assert book.bias() == {"overtaken": 2, "length_bias": -1.0}
    book.finish(0, played(0, 12))
    assert book.bias()["length_bias"] == 3 - (12 + 4) / 2
    book.finish(2, played(2, 6))
    assert numbers(book.batch()) == [0, 2]
    assert book.bias() == {"overtaken": 0, "length_bias": 0.0}  # the same four episodes


def test_episodes_that_failed_before_their_first_turn_have_no_length() -> None:
    book = ledger(tasks=1, samples=2, order="completion")
    book.admit(0)  # groups 0 and 1 of two episodes
    book.finish(2, played(2, 10))
    book.finish(3, played(3, outcome="error"))
    book.finish(0, played(0, 40))
    assert numbers(book.batch()) == [2, 3]
    assert book.bias()["length_bias"] == 10 - 40


def test_a_resumed_run_continues_with_the_lengths_so_far() -> None:
    book = ledger(order="completion")
    book.admit(0)
    for number, tokens in ((3, 2), (1, 4), (0, 12)):
        book.finish(number, played(number, tokens))
    book.batch()
    again = ledger(order="completion")
    again.restore(json.loads(json.dumps(book.state() | {"iteration": 1})), book.kept())
    assert again.bias()["length_bias"] == book.bias()["length_bias"] == -5.0


def test_in_order_of_admission_no_bias_is_reported() -> None:
    assert ledger().bias() == {}


def test_an_episode_is_counted_once() -> None:
    book = ledger()
    book.admit(0)
    assert book.finish(0, played(0)) and not book.finish(0, played(0))
    assert not book.finish(17, played(17))  # never admitted
    book.finish(1, played(1))
    book.batch()
    assert not book.finish(0, played(0))  # trained


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, int, Order, list[int]]:
    order = draw(st.sampled_from(("admission", "completion")))
    staleness = draw(st.integers(1 if order == "completion" else 0, 3))
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        staleness,
        order,
        draw(st.lists(st.integers(0, 99))),
    )


def run(
    book: EpisodeLedger, terms: tuple[int, int, int, Order, list[int]], first: int, last: int
) -> Iterator[list[int]]:
    """Yield the batches of the iterations; the schedule's numbers choose which episode finishes next."""
    _, _, _, _, picks = terms
    for iteration in range(first, last):
        book.admit(iteration)
        while (batch := book.batch()) is None:
            left = book.unfinished()
            pick = left[(picks or [0])[iteration % max(1, len(picks))] % len(left)]
            book.finish(pick.number, played(pick.number))
        yield numbers(batch)


@given(schedules(), st.integers(0, 6), st.integers(1, 3))
def test_a_batch_that_is_put_back_is_trained_on_once_after_a_resume_and_its_failed_episodes_are_played_again(
    terms, cut: int, every: int
) -> None:
    tasks, samples, staleness, order, _ = terms
    book = ledger(tasks, samples, staleness, order)
    before = [number for batch in run(book, terms, 0, cut) for number in batch]
    book.admit(cut)
    for episode in book.unfinished():  # so that the next batch fails, and later ones too
        outcome: Outcome = "timeout" if episode.number % every == 0 else "ok"
        book.finish(episode.number, played(episode.number, outcome=outcome))
    open_before = book.state() | {"lengths": None}
    batch = book.batch()
    book.put_back()
    assert book.state() | {"lengths": None} == open_before
    again = ledger(tasks, samples, staleness, order)
    state = json.loads(json.dumps(book.state() | {"iteration": cut}))
    again.restore(state, decode_episodes(encode_episodes(book.kept(), ()))[0])
    played_again = {a.number for a in again.unfinished()}
    assert played_again == {done.number for done in book.kept() if done.trajectory.outcome == "timeout"}
    after = [number for batch in run(again, terms, cut, cut + 4) for number in batch]
    assert len(set(before + after)) == len(before + after) == (cut + 4) * tasks * samples
    assert set(numbers(batch)) <= set(after) or order == "completion"


def test_a_colocated_run_continues_from_the_ledgers_cursor() -> None:
    book = ledger(tasks=2, staleness=2)
    list(run(book, (2, 1, 2, "admission", []), 0, 3))
    cursor = TaskCursor(TASKS, 0)
    cursor.restore(book.state()["cursor"])
    expected = TaskCursor(TASKS, 0)
    expected.take(6)
    assert cursor.take(5) == expected.take(5)


def test_a_run_that_was_colocated_continues_with_the_numbers_of_its_iteration() -> None:
    book = ledger(tasks=2, samples=3, staleness=0)
    book.restore({"cursor": TaskCursor(TASKS, 0).state(), "iteration": 4})
    assert [a.number for a in book.admit(4)] == list(range(24, 30))


def test_after_the_bound_was_lowered_episodes_that_are_too_old_now_are_played_again() -> None:
    book = ledger(tasks=1, staleness=3)
    book.admit(0)  # 0 to 3
    book.finish(0, played(0))
    book.batch()
    for number, version in ((1, 0), (2, 0), (3, 1)):  # trained by iterations 1, 2 and 3
        turn = Turn((7,), (-1.0,), (), 0.0, ((version, 1),))
        book.finish(number, Trajectory(ELSEWHERE, (number,), (turn,), "ok"))
    state = json.loads(json.dumps(book.state() | {"iteration": 1}))
    played_again = {}
    for staleness in (0, 1, 2, 3):
        again = ledger(tasks=1, staleness=staleness)
        again.restore(state, book.kept())
        # before iteration 1, and by the admission of iterations 1, 2 and 3
        new = [again.unfinished(), *(again.admit(iteration) for iteration in (1, 2, 3))]
        played_again[staleness] = [[a.number for a in episodes] for episodes in new]
    assert played_again == {
        0: [[1], [], [2], [3]],
        1: [[2], [], [3], [4]],
        2: [[], [], [4], [5]],
        3: [[], [4], [5], [6]],
    }
    assert again.unfinished()[0].task == TaskCursor(TASKS, 0).take(5)[4], "no task is left out"


def test_open_groups_of_another_size_are_refused() -> None:
    book = ledger(tasks=2)
    book.admit(0)
    state = book.state() | {"iteration": 0}
    with pytest.raises(ConfigError, match=r"rollout.tasks_per_iteration=3: .* resume with .*=2"):
        ledger(tasks=3).restore(state)
