"""The environment without a model: actions in, hints and rewards out. Run it with `pytest`."""

import asyncio

from guess import GuessTheDigit, reward

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments.base import Environment, StepResult

SEVEN = Task("digits", (Message("user", "Guess my digit."),), ("7",), "train", 7)


def play(*actions: str, max_turns: int = 3) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        environment = GuessTheDigit(max_turns)
        assert isinstance(environment, Environment)
        assert await environment.reset(SEVEN, seed=0) == list(SEVEN.prompt)
        results = [await environment.step(action) for action in actions]
        await environment.close()
        return results

    return asyncio.run(episode())


def test_a_wrong_guess_is_answered_with_a_hint() -> None:
    low, high = play("is it 3", "9")
    assert (low.observation, low.done) == (" higher ", False)
    assert (high.observation, high.done) == (" lower ", False)


def test_the_right_digit_ends_the_episode_with_the_reward() -> None:
    (result,) = play("7")
    assert (result.done, result.outcome, result.reward) == (True, "ok", reward(True, 1))


def test_the_last_wrong_guess_ends_the_episode_without_a_reward() -> None:
    last = play("1", "2", "3")[-1]
    assert (last.done, last.outcome, last.reward) == (True, "wrong", 0.0)


def test_an_action_without_a_digit_is_not_valid_and_costs_a_guess() -> None:
    nothing, end = play("what?", "1", max_turns=2)
    assert (nothing.valid, nothing.observation) == (False, " a digit? ")
    assert end.done
