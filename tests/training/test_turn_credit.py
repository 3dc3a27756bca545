"""Advantages of turns without a critic (group_turn, gigpo), from trajectories to action tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_stppo.algorithm.baselines import same_index, same_state
from megatron_stppo.base.types import Branch, ScoredBatch, Summary, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import groups_of, rollout_logprobs, without_tokens
from megatron_stppo.evidence.bench import defined_advantages
from megatron_stppo.evidence.checks.advantages import defined
from megatron_stppo.parallel.collectives import decode, encode
from megatron_stppo.training.advantage import estimate, has_signal

TASK = Task("t", (), ("a",), "train", 0)
PROMPT = (1, 2)


def turn(reward: float, observation: tuple[int, ...] = (7,), tokens: int = 1) -> Turn:
    return Turn((5,) * tokens, (-1.0,) * tokens, observation, reward, ((0, tokens),))


def settings(**given: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "grpo", "kl_coefficient": 0.0} | given)


def advantages(episodes: list[Trajectory], **given: object) -> list[float]:
    """Return the advantages of the action tokens, from summaries that another rank has sent."""
    every = [history for episode in episodes for history in episode.histories()]
    sent = decode(encode([history.summary for history in every]), list[Summary])
    batch, group_N = without_tokens(sent, rollout_logprobs(every)), groups_of(sent)
    batch = ScoredBatch.of(batch, epochs=())
    advantage_T = estimate(batch, settings(**given), group_N).advantage_T
    assert has_signal(batch, settings(**given), group_N) == advantage_T.any()
    return advantage_T.tolist()


def test_a_reward_counts_for_its_turn_and_earlier_ones() -> None:
    """The second turns differ in nothing but the reward of the first, which they have not caused.

    Outcomes: 1 and 0. Returns: 1, 0 at the first turn, 0, 0 at the second.
    """
    played = [Trajectory(TASK, PROMPT, (turn(reward), turn(0.0, (), 2)), "ok") for reward in (1.0, 0.0)]
    assert advantages(played, advantage="group") == pytest.approx([1, 1, 1, -1, -1, -1])
    assert advantages(played, advantage="group_turn") == pytest.approx([1, 0, 0, -1, 0, 0])


def test_an_episode_that_ends_early_is_compared_by_its_return_with_those_that_go_on() -> None:
    """Rewards (1/2, 1), (1/2), (0, 0), with gamma 1.

    Returns at the first turn: 3/2, 1/2, 0, of mean 2/3 and variance 7/18. At the second: 1, 0. By its first
    reward alone the second episode would be as good as the first.
    """
    played = [
        Trajectory(TASK, PROMPT, tuple(map(turn, rewards)), "ok") for rewards in ((0.5, 1), (0.5,), (0, 0))
    ]
    deviation = (7 / 18) ** 0.5
    expected = [5 / 6 / deviation, 1, -1 / 6 / deviation, -2 / 3 / deviation, -1]
    assert advantages(played, advantage="group_turn") == pytest.approx(expected, abs=1e-6)


def test_rewards_at_another_time_are_a_signal_for_turns_only() -> None:
    played = [Trajectory(TASK, PROMPT, (turn(1.0 - r), turn(r)), "ok") for r in (0.0, 1.0)]
    assert not any(advantages(played, advantage="group"))
    assert advantages(played, advantage="group_turn") == pytest.approx([0, -1, 0, 1])


def test_gigpo_adds_the_advantage_among_turns_that_answer_the_same_observation() -> None:
    """Both episodes have the prompt and, at their last turn, the observation (8,); gamma is 1/2.

    Outcomes: 1 and 0, that is 1 and -1. Returns: 0.25, 0.5, 1 and 0, 0. The prompt: 0.25 and 0, that is 1 and
    -1. (8,): 1 and 0, that is 1 and -1. The observation (7,) occurs once: 0.
    """
    played = [
        Trajectory(TASK, PROMPT, (turn(0.0, (7,)), turn(0.0, (8,)), turn(1.0, ())), "ok"),
        Trajectory(TASK, PROMPT, (turn(0.0, (8,)), turn(0.0, ())), "wrong"),
    ]
    given = {"preset": "gigpo", "gamma": 0.5}
    assert advantages(played, **given) == pytest.approx([2, 1, 2, -2, -2], abs=1e-6)
    assert advantages(played, turn_weight=0.5, **given) == pytest.approx([1.5, 1, 1.5, -1.5, -1.5], abs=1e-6)


def drawn(generator: random.Random, turns: int, group: int) -> Trajectory:
    """Return an episode with rewards at any turn, whose observations often repeat."""
    played = [
        turn(
            generator.choice((0.0, 0.5, 1.0)),
            (generator.randrange(7, 9),) * generator.randrange(3),
            generator.randrange(1, 4),
        )
        for _ in range(turns)
    ]
    outcome = generator.choice(("ok", "ok", "ok", "wrong", "error"))
    branches = (Branch((3,), (replace(played[-1]),)),) if generator.random() < 0.3 else ()
    return Trajectory(TASK, PROMPT, tuple(played), outcome, group, branches=branches)


@pytest.mark.parametrize("longest", [4, 11])
def test_no_turn_is_many_deviations_from_turns_that_it_is_not_among(longest: int) -> None:
    """A longer episode, whose last turns have almost the return of the others, and a further history."""
    turns = [turn(0.0)] * (longest - 1)

    def branches(reward: float) -> tuple[Branch, ...]:  # whose turn has the reward of the episode
        return (Branch((3,), (turn(reward),)),)

    played = [
        Trajectory(TASK, PROMPT, (turn(0.0), turn(0.5)), "ok"),
        Trajectory(
            TASK, PROMPT, (turn(0.0), turn(-0.5), *turns, turn(0.999)), "ok", branches=branches(0.499)
        ),
    ]
    assert max(map(abs, advantages(played, advantage="group_turn"))) <= (longest + 2) ** 0.5
    alike = [
        Trajectory(TASK, PROMPT, (*[turn(0.0)] * n, turn(1.0)), "ok", branches=branches(1.0)) for n in (3, 9)
    ]
    assert max(map(abs, advantages(alike, advantage="group_turn", gamma=0.95))) <= 3


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("advantage", ["group_turn", "gigpo"])
def test_advantages_are_those_of_the_definition_for_any_episodes(advantage: str, seed: int) -> None:
    generator = random.Random(seed)
    played = [
        drawn(generator, generator.randrange(1, 5), group=generator.randrange(3))
        for _ in range(generator.randrange(1, 10))
    ]
    weight = 0.5 if advantage == "gigpo" else 1.0
    given = {"advantage": advantage, "gamma": 0.75, "turn_weight": weight}
    episodes = defined([history for episode in played for history in episode.histories()], seed)
    defined_advantages.estimate(episodes, settings(**given))
    turns = [turn for episode in episodes for history in episode.histories for turn in history]
    needed = [token.advantage for turn in turns for token in turn.acted]
    assert advantages(played, **given) == pytest.approx(needed, abs=1e-5)


def test_a_turn_has_the_state_of_the_tokens_that_it_answers() -> None:
    one, two = (Trajectory(TASK, (1, 2), (turn(0.0, read), turn(0.0, ())), "ok") for read in ((7, 8), ()))
    other = Trajectory(TASK, (7, 8), (turn(0.0),), "ok")
    states = [[t.state for t in played.summary.turns] for played in (one, two, other)]
    assert states[0][0] == states[1][0] != states[0][1] == states[2][0] != 0, "the prompt, then (7, 8)"
    assert states[1][1] == 0, "no observation"
    batch = without_tokens([one.summary, two.summary], torch.zeros(4))
    assert batch.state_S is not None and batch.state_S.tolist() == states[0] + states[1]


@pytest.mark.parametrize("same", [same_index, same_state])
def test_no_turns_have_no_cells(same: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert [len(x) for x in same(none, torch.zeros(2), torch.tensor([True, True]), none)] == [0, 0]
