"""The simulation of asynchronous training against cases worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import pytest

from megatron_stppo.data.ledger import Order, Terms
from megatron_stppo.plan.simulation.asynchronous import (
    AsynchronousRun,
    AsynchronousSimulation,
    Window,
    simulate,
)
from megatron_stppo.plan.simulation.engine import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.replica import UpdateKind
from megatron_stppo.plan.simulation.workload import (
    DrawnLengths,
    LogNormal,
    PlannedEpisode,
    RecordedLengths,
    Sizes,
    ToolTimes,
    Workload,
)

STEP = EngineSpeed(0.01)


@dataclass(frozen=True)
class InTurn(Workload):
    """Episodes of these sizes in turn, with `call` seconds between turns."""

    call: float = 0.0

    def episode(self, number: int) -> PlannedEpisode:
        sizes = self.lengths.records[number % len(self.lengths.records)]  # type: ignore[union-attr]
        return PlannedEpisode(sizes, (self.call,) * (len(sizes.turns) - 1))


def played(sizes: Sequence[Sizes], call: float = 0.0) -> Workload:
    return InTurn(RecordedLengths(tuple(sizes)), ToolTimes(), call=call)


# one turn of 100 steps, which take 1 s
ONE_SECOND = played([Sizes(((10, 100),))])


def two_turns(between: LogNormal, at_once: int = 64) -> Workload:
    """Two turns of 50 steps, which take 0.5 s each, with a call in between."""
    return Workload(RecordedLengths((Sizes(((10, 50), (10, 50))),)), ToolTimes(between, at_once=at_once))


def run(
    work: Workload, staleness: int, train: float, batch: int = 4, order: Order = "admission"
) -> AsynchronousRun:
    """One replica with places for one batch."""
    return AsynchronousRun(
        work, Terms(batch, 1, staleness, order), STEP, TrainerSpeed(train), concurrency=batch
    )


VARIED = Workload(
    DrawnLengths(LogNormal(50, 200), LogNormal(3, 6), LogNormal(20, 100), LogNormal(50, 100), 1000),
    ToolTimes(LogNormal(0.2, 4.0)),
)


@pytest.mark.parametrize("train", [0.5, 1.0, 3.0])
def test_a_synchronous_iteration_takes_the_sum_of_rollout_and_training(train: float) -> None:
    found = simulate(run(ONE_SECOND, 0, train))
    assert found.iteration_seconds == pytest.approx(1.0 + train)
    assert found.replica_idle == pytest.approx(train / (1.0 + train))
    assert found.waiting == pytest.approx(1.0)
    assert found.staleness == {0: 1.0}


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("train", [0.5, 1.0, 3.0])
def test_an_asynchronous_iteration_takes_the_longer_of_rollout_and_training(
    train: float, staleness: int
) -> None:
    found = simulate(run(ONE_SECOND, staleness, train))
    assert found.iteration_seconds == pytest.approx(max(1.0, train))
    assert found.tokens_per_second == pytest.approx(4 * 110 / max(1.0, train))


def test_replicas_share_the_episodes_equally() -> None:
    # 8 episodes, 2 replicas: 4 sequences in every step, 1 s for 100 steps
    speed = EngineSpeed(0.0, sequence=0.0025)
    found = simulate(replace(run(ONE_SECOND, 0, 1.0, batch=8), engine=speed, replicas=2))
    assert (found.running, found.iteration_seconds) == (4.0, pytest.approx(2.0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("update", ["recompute", "drain"])
@pytest.mark.parametrize("order", ["admission", "completion"])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_nothing_is_lost_or_trained_twice_and_no_trajectory_exceeds_the_bound(
    seed: int, update: UpdateKind, order: Order, staleness: int
) -> None:
    """In the order of completion the number of open episodes is bounded, but not the staleness of each."""
    terms = Terms(8, 3, staleness, order)
    trainer = TrainerSpeed(0.1, 1e-5 if seed else 5e-4)  # seed 0: training takes longer than the rollout
    work = replace(VARIED, seed=seed)
    made = AsynchronousRun(work, terms, STEP, trainer, 2, 16, update, first=0.05, transfer=0.05, publish=0.01)
    simulation = AsynchronousSimulation(made, Window(2, 10))
    found = simulation.run()
    trained = [one.number for one in chain.from_iterable(simulation.batches)]
    left = [number for group in simulation.ledger.open for number in range(3 * group, 3 * group + 3)]
    assert len(trained) == 12 * 24
    assert sorted(trained + left) == list(range(3 * simulation.ledger.next))
    assert len(left) <= (staleness + 1) * 24
    assert order == "completion" or (max(found.staleness) <= staleness and trained == list(range(12 * 24)))


def test_completion_trains_on_quick_episodes_first_and_slow_ones_may_exceed_the_bound() -> None:
    """Batches of 2 episodes of 1 s, of which episode 2 takes 10 s. Training takes 1 s.

    At bound 1, episodes 0 to 3 begin at once. Batch 0 is (0, 1), batch 1 is (3, 4), and so on: a batch in
    2 s. Episode 2 is complete at 10 s, and is in the batch that is complete at 11 s, five versions later.
    """
    quick, slow = Sizes(((10, 100),)), Sizes(((10, 1000),))
    work = played([quick, quick, slow, *[quick] * 97])
    made = replace(run(work, 1, 1.0, batch=2, order="completion"), concurrency=8)
    simulation = AsynchronousSimulation(made, Window(0, 8))
    found = simulation.run()
    batches = [[one.number for one in batch] for batch in simulation.batches]
    assert batches[:2] == [[0, 1], [3, 4]]
    assert [number for number, batch in enumerate(batches) if 2 in batch] == [5]
    assert max(found.staleness) == 5


def test_a_tail_costs_nothing_at_bound_1_and_its_whole_length_at_bound_0() -> None:
    """Training takes 3 s and a rollout 1 s. One call in 16 takes 2 s more."""
    work = two_turns(Tail(seconds=2.0, of=16))
    at_1 = simulate(replace(run(work, 1, 3.0, batch=64), concurrency=128))
    without = simulate(run(ONE_SECOND, 1, 3.0, batch=64))
    assert at_1.iteration_seconds < 1.02 * without.iteration_seconds == pytest.approx(3.06)
    at_0 = simulate(run(work, 0, 3.0, batch=64), Window(0, 12))
    assert 5.9 < at_0.iteration_seconds < 6.1


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_slow_episode_lengthens_an_iteration_by_its_share_of_the_waits(staleness: int) -> None:
    """Every batch has an episode of 10 s. Between its admission and its batch lie `staleness` trainings of
    1 s and `staleness` + 1 waits, so an iteration takes (10 + 1) / (staleness + 1) seconds."""
    work = played([Sizes(((10, 100),))] * 7 + [Sizes(((10, 1000),))])
    made = run(work, staleness, 1.0, batch=8)
    found = simulate(replace(made, concurrency=100))
    assert found.iteration_seconds == pytest.approx(11 / (staleness + 1))


def test_recomputing_takes_the_tokens_of_what_runs() -> None:
    """Bound 1. Training takes 0.5 s, a transfer 0.25 s and a turn 1 s.

    At 0 s two batches begin, which are complete at 1 s. Batch 0 is trained on until 1.5 s. Version 1 is
    sent until 1.75 s, and batch 1 is trained on until 2 s. Batch 2 begins with version 1, at 1.75 s: 25
    steps of it are over when version 2 is sent, until 2.25 s, so 4 x (10 + 25) tokens are computed again. It
    is complete at 3 s, and trained on until 3.5 s.
    """
    made = replace(run(ONE_SECOND, 1, 0.5), concurrency=8, first=0.25)
    simulation = AsynchronousSimulation(made, Window(0, 3))
    found = simulation.run()
    assert found.recomputed == pytest.approx(4 * 35 / 3)
    assert found.iteration_seconds == pytest.approx(3.5 / 3)
    assert found.replica_paused == pytest.approx(0.5 / 3.5)


def test_draining_ends_running_turns_before_the_update_and_recomputes_nothing() -> None:
    """As above, but batch 2 runs from 1.75 s to 2.75 s, and version 2 is sent after that, while batch 2 is
    trained on until 3.25 s."""
    made = replace(run(ONE_SECOND, 1, 0.5), concurrency=8, first=0.25, update="drain")
    simulation = AsynchronousSimulation(made, Window(0, 3))
    found = simulation.run()
    assert found.recomputed == 0
    assert found.iteration_seconds == pytest.approx(3.25 / 3)


def test_episodes_that_are_completed_before_an_update_are_as_old_as_the_bound() -> None:
    """Two turns of 0.5 s with a call of 0.5 s in between: an episode takes 1.5 s, training 0.5 s, sending
    0.25 s, after which the episodes begin. Training ends 1.25 s before them. With drain the weights are sent
    at the end of the first turn."""
    made = replace(run(two_turns(LogNormal(0.5, 0.5)), 1, 0.5), concurrency=8, first=0.25)
    found = simulate(replace(made, update="complete"))
    assert found.iteration_seconds == pytest.approx(1.75)
    assert (found.waiting, found.training, found.publishing) == pytest.approx((1.25, 0.5, 0.0))
    assert found.staleness == {1: 1.0} and found.recomputed == 0
    assert simulate(replace(made, update="drain")).iteration_seconds < 1.75


def test_replicas_pass_weights_on_and_both_ends_of_a_transfer_pause() -> None:
    """The trainer sends to the first replica, which sends to the second; then each sends to another one."""
    made = replace(run(ONE_SECOND, 0, 1.0, batch=8), replicas=4, first=0.5, transfer=0.5, publish=0.25)
    found = simulate(made)
    assert found.iteration_seconds == pytest.approx(1.0 + 1.0 + 3 * 0.5 + 0.25)
    assert found.publishing == pytest.approx(0.25)
    assert found.replica_paused == pytest.approx((1.5 + 1.0 + 0.5 + 0.5) / 4 / 3.75)


def test_the_time_until_all_replicas_have_the_weights_grows_with_the_logarithm_of_their_number() -> None:
    seconds = {}
    for count in (4, 16, 64):
        made = replace(run(ONE_SECOND, 0, 1.0, batch=count), replicas=count, first=0.5, transfer=0.5)
        seconds[count] = (simulate(made, Window(1, 2)).iteration_seconds - 2.0) / 0.5
    assert seconds == pytest.approx({4: 3, 16: 6, 64: 9}, abs=1.01)


def test_calls_wait_for_a_place() -> None:
    """4 calls of 1 s, two at a time: turns end at 0.5 s, calls at 1.5 s and 2.5 s, episodes at 3 s."""
    found = simulate(run(two_turns(LogNormal(1, 1), at_once=2), 0, 1.0))
    assert found.iteration_seconds == pytest.approx(4.0)
    assert found.calls_waiting == pytest.approx(2 * 1.0 / 4.0)


def test_without_overlap_the_engine_waits_for_all_calls() -> None:
    """Two episodes of 50 + 50 steps and of 60 steps: the call of 1 s after step 50 stops both."""
    work = played([Sizes(((10, 50), (10, 50))), Sizes(((10, 60),))], call=1.0)
    made = run(work, 0, 0.0, batch=2)
    beside, alone = (simulate(replace(made, overlap=overlap), Window(0, 1)) for overlap in (True, False))
    assert beside.waiting == alone.waiting == pytest.approx(2.0)
    assert (beside.replica_idle, alone.replica_idle) == pytest.approx((1 - 1.1 / 2, 1 - 1.0 / 2))


def test_a_forecast_does_not_depend_on_anything_but_its_arguments() -> None:
    made = AsynchronousRun(VARIED, Terms(16, 1, 2), STEP, TrainerSpeed(0.1), 2)
    assert simulate(made) == simulate(made)
    assert simulate(made) != simulate(replace(made, work=replace(VARIED, seed=1)))


class Tail:
    """No time, except for one call in `of`."""

    def __init__(self, seconds: float, of: int) -> None:
        self.seconds, self.of = seconds, of

    def draw(self, chance: random.Random) -> float:
        return self.seconds if chance.random() * self.of < 1 else 0.0
