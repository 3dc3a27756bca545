"""The simulated engine against numbers worked out by hand, and against a loop over single steps."""

from __future__ import annotations

import random
from functools import partial

import pytest

from megatron_stppo.plan.simulation.engine import Clock, EngineSpeed, Generation, StepEngine

Arrival = tuple[float, int, int]  # seconds, tokens of the prompt, tokens to generate


def test_a_step_takes_the_sum_of_its_four_terms() -> None:
    speed = EngineSpeed(step=1.0, sequence=0.1, prefill=0.01, context=0.001)
    # three steps of 2 sequences with 10 tokens before the first: 10, 12 and 14 tokens of context
    assert speed.elapsed(3, 2, 10, 5) == pytest.approx(3 * 1.2 + 0.001 * 36 + 0.05)


def test_a_turn_takes_a_step_per_token_and_reads_its_prompt_in_the_first() -> None:
    # 4 steps of 1 s, and 0.1 s for each of 20 tokens
    assert finish_times(EngineSpeed(1.0, prefill=0.1), [(0.0, 20, 4)]) == [pytest.approx(6.0)]


def test_a_late_turn_enters_at_the_end_of_the_running_step() -> None:
    # the second arrives in the third step, enters with the fourth, and ends with the fifth
    assert finish_times(EngineSpeed(1.0), [(0.0, 1, 10), (2.5, 1, 2)]) == [10.0, 5.0]


def test_a_long_prompt_takes_several_steps_beside_running_sequences() -> None:
    # of the second prompt, steps 2, 3 and 4 read 9 tokens each, and step 5 the last 3
    speed = EngineSpeed(1.0, most_tokens=10)
    assert finish_times(speed, [(0.0, 1, 6), (0.5, 30, 1)]) == [6.0, 5.0]


def test_turns_beyond_the_largest_number_of_sequences_wait_in_order() -> None:
    speed = EngineSpeed(1.0, most_sequences=2)
    assert finish_times(speed, [(0.0, 1, 3), (0.0, 1, 2), (0.0, 1, 2), (0.0, 1, 1)]) == [3.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("seed", range(8))
def test_counting_many_steps_at_once_gives_the_times_of_single_steps(seed: int) -> None:
    chance = random.Random(seed)
    speed = EngineSpeed(0.01, 0.001, 1e-4, 1e-6, most_sequences=6, most_tokens=64)
    arrivals = sorted(
        (chance.choice([0.0, 3 * chance.random()]), chance.randint(1, 150), chance.randint(1, 60))
        for _ in range(30)
    )
    assert finish_times(speed, arrivals) == pytest.approx(single_steps(speed, arrivals))


def finish_times(speed: EngineSpeed, arrivals: list[Arrival]) -> list[float]:
    clock, found = Clock(), dict[int, float]()
    engine = StepEngine(clock, speed)

    def finished(number: int) -> None:
        found[number] = clock.now

    for number, (seconds, prompt, tokens) in enumerate(arrivals):
        turn = Generation(prompt, prompt, tokens, partial(finished, number), lambda: None)
        clock.at(seconds, partial(engine.add, turn))
    clock.run(lambda: len(found) == len(arrivals))
    assert engine.generated == sum(tokens for _, _, tokens in arrivals)
    return [found[number] for number in range(len(arrivals))]


def single_steps(speed: EngineSpeed, arrivals: list[Arrival]) -> list[float]:
    """The same engine as a loop over its steps."""
    now, found = 0.0, dict[int, float]()
    fresh = {number: prompt for number, (_, prompt, _) in enumerate(arrivals)}
    context, left = dict(fresh), {number: tokens for number, (_, _, tokens) in enumerate(arrivals)}
    running: list[int] = []
    while len(found) < len(arrivals):
        waiting = [n for n in fresh if n not in running and n not in found and arrivals[n][0] <= now]
        if not running and not waiting:
            now = min(arrivals[n][0] for n in fresh if n not in found)
            continue
        room, prefill = speed.most_tokens - len(running), 0
        for number in waiting:
            if room == 0 or len(running) == speed.most_sequences:
                break
            taken = min(room, fresh[number])
            room, prefill, fresh[number] = room - taken, prefill + taken, fresh[number] - taken
            if fresh[number]:
                break
            running.append(number)
        now += speed.elapsed(1, len(running), sum(context[n] for n in running), prefill)
        for number in list(running):
            context[number] += 1
            left[number] -= 1
            if not left[number]:
                running.remove(number)
                found[number] = now
    return [found[number] for number in range(len(arrivals))]
