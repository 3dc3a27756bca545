"""The ledger with dynamic sampling: groups without variance are dropped, and the promises hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.data.ledger import Order, Taken, Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.wire.episodes import decode_episodes, encode_episodes
from megatron_stppo.replicas.wire.messages import Assignment

TASKS = tuple(Task("test", (), ("yes",), "train", index) for index in range(40))
SAMPLES = 2


def finish(book: EpisodeLedger, number: int, reward: float, version: int = 0) -> None:
    turn = Turn((7,), (-0.5,), (), reward, ((version, 1),))
    book.finish(number, Trajectory(TASKS[0], (number,), (turn,), "ok"))


@dataclass
class Run:
    """A ledger whose episodes finish in any order. Groups of the tasks `flat` have no variance."""

    terms: Terms
    flat: frozenset[int] = frozenset()
    picks: tuple[int, ...] = ()
    admitted: dict[int, tuple[int, Assignment]] = field(default_factory=dict)  # number: (iteration, episode)

    iteration: int = 0  # that collects its batch; the version that all episodes are played with
    seed: int = 0

    def __post_init__(self) -> None:
        self.book = EpisodeLedger(TaskCursor(TASKS, seed=0), self.terms, self.seed)

    def note(self, iteration: int, new: list[Assignment]) -> bool:
        assert not self.admitted.keys() & {a.number for a in new}, "an episode is admitted once"
        self.admitted |= {a.number: (iteration, a) for a in new}
        return bool(new)

    def finish_one(self, step: int) -> None:
        left = self.book.unfinished()
        one = left[(self.picks or (0,))[step % max(1, len(self.picks))] % len(left)]
        reward = 1.0 if one.number % SAMPLES or one.task.index in self.flat else 0.0
        finish(self.book, one.number, reward, self.iteration)

    def batches(self, first: int, last: int, cut: int = 10**9) -> Iterator[list[Trajectory]]:
        """Yield the batches of iterations; stop after `cut` episodes, in the middle of a batch."""
        step = 0
        for iteration in range(first, last):
            self.iteration = iteration
            self.note(iteration, self.book.admit(iteration))
            while True:
                while self.note(iteration, self.book.resample()):
                    pass
                if (batch := self.book.batch()) is not None:
                    break
                if step == cut:
                    return
                self.finish_one(step)
                step += 1
            yield batch

    def saved(self, iteration: int, terms: Terms | None = None) -> Run:
        """Return a run that continues from a checkpoint, perhaps with other terms."""
        again = Run(terms or self.terms, self.flat, self.picks)
        state = json.loads(json.dumps(self.book.state() | {"iteration": iteration}))
        again.book.restore(state, decode_episodes(encode_episodes(self.book.kept(), ()))[0])
        return again


def groups(batch: list[Trajectory]) -> list[int]:
    return [trajectory.prompt_ids[0] // SAMPLES for trajectory in batch][::SAMPLES]


def flat_tasks(*places: int) -> frozenset[int]:
    """Return the tasks at these places of the cursor's order."""
    drawn = TaskCursor(TASKS, seed=0).take(max(places) + 1)
    return frozenset(drawn[place].index for place in places)


def test_at_bound_0_the_rounds_tasks_and_random_numbers_are_those_of_a_colocated_run() -> None:
    run = Run(Terms(4, SAMPLES, 0, resample=2), flat_tasks(0, 3, 4), seed=5)
    batches = list(run.batches(0, 2))
    assert [groups(batch) for batch in batches] == [[1, 2, 5, 6], [7, 8, 9, 10]]
    assert [t.group for t in batches[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    drawn = TaskCursor(TASKS, 0).take(11)
    places = [(0, place) for place in range(7)] + [(1, place) for place in range(4)]  # (iteration, group)
    for number, (_, episode) in run.admitted.items():
        iteration, place = places[number // SAMPLES]
        assert episode.task == drawn[number // SAMPLES]
        assert (episode.seed, episode.place) == (5_000_015 + iteration, place * SAMPLES + number % SAMPLES)


def test_all_groups_of_a_round_are_completed_before_one_is_dropped() -> None:
    run = Run(Terms(2, SAMPLES, 0, resample=1), flat_tasks(0))
    run.note(0, run.book.admit(0))
    for step in range(3):
        run.finish_one(step)
        assert not run.book.resample() and run.book.batch() is None
    run.finish_one(3)
    assert [a.number for a in run.book.resample()] == [4, 5]
    assert run.book.batch() is None
    assert not run.book.finish(0, Trajectory(TASKS[0], (), (), "ok")), "it is dropped"


def test_at_the_bound_groups_without_variance_fill_the_batch() -> None:
    run = Run(Terms(2, SAMPLES, 1, resample=2), frozenset(range(40)))
    first, second = run.batches(0, 2)
    assert (groups(first), groups(second)) == ([4, 5], [10, 11])
    assert run.book.taken == Taken([10, 11], [[6, 7], [8, 9]])
    assert [(s.group, s.reward) for s in run.book.dropped] == [(n // 2, 1.0) for n in range(8)]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    order: Order = draw(st.sampled_from(("admission", "completion")))
    staleness = draw(st.integers(1 if order == "completion" else 0, 3))
    terms = Terms(draw(st.integers(1, 3)), SAMPLES, staleness, order, resample=draw(st.integers(0, 3)))
    flat = draw(st.frozensets(st.integers(0, 39)))
    return Run(terms, flat, tuple(draw(st.lists(st.integers(0, 99), max_size=20))))


@settings(deadline=None, max_examples=40)
@given(runs())
def test_every_admitted_group_is_trained_dropped_or_open_and_the_bound_on_staleness_holds(run: Run) -> None:
    terms, closed = run.terms, list[int]()
    for iteration, batch in enumerate(run.batches(0, 6)):
        taken = run.book.taken
        assert groups(batch) == taken.groups and len(taken.groups) == terms.tasks
        assert len(taken.dropped) <= terms.resample
        if terms.order == "admission":
            assert all(iteration - run.admitted[n * SAMPLES][0] <= terms.max_staleness for n in taken.groups)
        dropped = [number for numbers in taken.dropped for number in numbers]
        tasks = {number: run.admitted[number * SAMPLES][1].task.index for number in [*dropped, *taken.groups]}
        assert all(tasks[number] in run.flat for number in dropped)
        if len(taken.dropped) < terms.resample:
            assert not any(tasks[number] in run.flat for number in taken.groups)
        closed += [*dropped, *taken.groups]
        left = {number // SAMPLES for number in run.admitted} - set(closed)
        assert len(closed) == len(set(closed)) and len(left) == terms.max_staleness * terms.tasks
    seeds = {(episode.seed, episode.place) for _, episode in run.admitted.values()}
    assert len(seeds) == len(run.admitted), "no two episodes have the same random numbers"


@settings(deadline=None, max_examples=40)
@given(runs(), st.integers(0, 40))
def test_a_checkpoint_in_the_middle_of_a_batch_loses_nothing(run: Run, cut: int) -> None:
    done = [run.book.taken for _ in run.batches(0, 5, cut)]
    again = run.saved(len(done))
    assert again.book.unfinished() == run.book.unfinished() and again.book.ready == run.book.ready
    expected, found = (
        [(one.book.taken, one.book.dropped, groups(batch)) for batch in one.batches(len(done), len(done) + 4)]
        for one in (run, again)
    )
    assert found == expected
    closed = [n for taken in [*done, *(x[0] for x in found)] for n in sum(taken.dropped, taken.groups)]
    assert len(closed) == len(set(closed))
    assert again.book.state() == run.book.state()


def test_a_colocated_run_begins_the_interrupted_iteration_again() -> None:
    run = Run(Terms(2, SAMPLES, 0, resample=2), flat_tasks(2))
    (first,) = run.batches(0, 2, cut=9)  # group 2 is dropped, and group 4 in its place is played
    assert groups(first) == [0, 1]
    state = run.book.state()
    assert state["ledger"]["rounds"] == [[2]]
    expected = TaskCursor(TASKS, 0)
    expected.take(2)
    assert state["cursor"] == expected.state()


def test_after_the_bound_was_lowered_no_task_is_left_out() -> None:
    run = Run(Terms(1, SAMPLES, 3, resample=1), flat_tasks(0))
    next(run.batches(0, 1))  # groups 0 to 3, then group 4 in the place of group 0
    assert run.book.taken == Taken([1], [[0]])
    state = json.loads(json.dumps(run.book.state() | {"iteration": 1}))
    again = Run(Terms(1, SAMPLES, 0, resample=1))
    again.book.restore(state)
    tasks = [a.task for a in again.book.unfinished()]
    for iteration in (1, 2, 3, 4):
        tasks += [a.task for a in again.book.admit(iteration)]
    assert tasks[::SAMPLES] == TaskCursor(TASKS, 0).take(6)[2:]


def test_a_dropped_group_that_is_not_admitted_now_is_admitted_again() -> None:
    """The order of completion dropped the last groups; with a lower bound they are not admitted any more."""
    run = Run(Terms(2, SAMPLES, 3, "completion", resample=1), flat_tasks(6, 7))
    run.note(0, run.book.admit(0))  # groups 0 to 7
    for number in (12, 13, 14, 15):  # of groups 6 and 7
        finish(run.book, number, 1.0)
    assert [a.number // SAMPLES for a in run.book.resample()] == [8, 8, 9, 9], "in the places of 6 and 7"
    again = run.saved(0, Terms(2, SAMPLES, 0, resample=0))
    assert {a.number // SAMPLES for a in again.book.unfinished()} == {0, 1}
    batches = list(again.batches(0, 5))
    assert [groups(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert again.book.taken.dropped == []


def test_groups_that_take_a_place_again_after_the_bound_was_lowered_get_random_numbers_of_their_own() -> None:
    run = Run(Terms(2, SAMPLES, 1, resample=1), flat_tasks(0))
    run.note(0, run.book.admit(0))  # groups 0 to 3
    for step in range(4):
        run.finish_one(step)
    assert [a.number // SAMPLES for a in run.book.resample()] == [4, 4], "in the place of group 0"
    again = run.saved(0, Terms(2, SAMPLES, 0, resample=1))  # groups 1 and 2 are open
    again.note(0, again.book.unfinished())
    list(again.batches(0, 3))
    seeds = {(episode.seed, episode.place) for _, episode in again.admitted.values()}
    assert len(seeds) == len(again.admitted)


def test_dropped_groups_are_numbered_in_the_order_of_their_admission() -> None:
    book = EpisodeLedger(TaskCursor(TASKS, seed=0), Terms(2, SAMPLES, 1, "completion", resample=1))
    book.admit(0)
    for number, reward in ((2, 1.0), (3, 1.0), (0, 0.5), (1, 0.5)):  # group 1, then group 0
        finish(book, number, reward)
    book.resample()
    for number in (4, 5, 6, 7):  # groups 2 and 3
        finish(book, number, float(number % 2))
    assert book.batch() is not None and book.taken == Taken([2, 3], [[1, 0]])
    assert [(s.group, s.reward) for s in book.dropped] == [(0, 0.5), (0, 0.5), (1, 1.0), (1, 1.0)]


def test_groups_that_were_dropped_for_a_batch_that_is_put_back_are_dropped_again_after_a_resume() -> None:
    """Each in its place, with the groups and random numbers of a run in which nothing failed."""
    for order in ("admission", "completion"):
        terms, flat = Terms(2, SAMPLES, 1, order, resample=2), flat_tasks(0, 3)
        straight = Run(terms, flat)
        expected = list(straight.batches(0, 3))
        run = Run(terms, flat)
        assert groups(next(run.batches(0, 1))) == groups(expected[0])
        run.book.put_back()
        again = run.saved(0)
        assert list(again.book.state()["ledger"]["rounds"]) == []
        after = list(again.batches(0, 3))
        assert [groups(batch) for batch in after] == [groups(batch) for batch in expected]
        seeds = {number: (a.seed, a.place) for number, (_, a) in again.admitted.items()}
        known = {number: (a.seed, a.place) for number, (_, a) in straight.admitted.items()}
        assert seeds.items() <= known.items() or order == "completion"
