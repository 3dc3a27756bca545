from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.base.types import Minibatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig, Config
from megatron_stppo.data.packing import to_batch
from megatron_stppo.training import value_pretraining
from megatron_stppo.training.value_pretraining import measured, monte_carlo, split
from megatron_stppo.validation.checks import check_output
from megatron_stppo.validation.run_folder import check_pretraining


def trajectory(*turns: tuple[int, int, float], outcome: str = "ok") -> Trajectory:
    """Return a trajectory of turns (tokens, tokens of the observation, reward)."""
    made = tuple(Turn((5,) * a, (-1.0,) * a, (7,) * o, r, ((0, a),)) for a, o, r in turns)
    return Trajectory(Task("t", (), ("a",), "train", 0), (1, 2, 3), made, outcome)


def targets(played: list[Trajectory], **given: Any) -> list[float]:
    settings = AlgorithmConfig(**({"preset": "st_ppo", "lam_length": 1.5} | given))
    found = monte_carlo(to_batch(played), played, settings).return_T
    assert found is not None
    return found.tolist()


def test_the_target_of_a_step_is_the_discounted_sum_of_the_rewards_from_it_on() -> None:
    played = [trajectory((2, 3, 1.0), (3, 0, 4.0)), trajectory((1, 0, -2.0))]
    # token level: the second turn has 1, 2 and 4, the last token of the first 1 + 1 / 2, the one before 3 / 4
    assert targets(played, gamma=0.5) == [0.75, 1.5, 1.0, 2.0, 4.0, -2.0]
    # turn level: 1 + 0.5 * 4 for both tokens of the first turn
    assert targets(played, gamma=0.5, gae_level="turn") == [3.0, 3.0, 4.0, 4.0, 4.0, -2.0]
    # the three observation tokens are steps too, from 4 / 2^5 to 4 / 2^3
    with_observations = [0.5 * 1.0625, 1.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, -2.0]
    assert targets(played, gamma=0.5, gae_observations=True) == with_observations
    assert targets(played) == [5.0, 5.0, 4.0, 4.0, 4.0, -2.0]


def test_targets_are_those_of_a_loop_in_float64_and_do_not_depend_on_lambda() -> None:
    generator = torch.Generator().manual_seed(0)
    played = [
        trajectory(*((1 + (3 * n + t) % 4, 2, float(torch.randn((), generator=generator))) for t in range(n)))
        for n in range(1, 6)
    ]
    expected = []
    for one in played:
        rewards = [r for turn in one.turns for r in [0.0] * (len(turn.token_ids) - 1) + [turn.reward]]
        after, sums = 0.0, []
        for reward in reversed(rewards):
            after = reward + 0.97 * after
            sums.append(after)
        expected += sums[::-1]
    for given in ({}, {"lam_critic": 0.3}, {"lam_length": None, "lam": 0.5}, {"whiten": False}):
        assert targets(played, gamma=0.97, **given) == pytest.approx(expected, rel=1e-6)


def test_only_the_tokens_of_the_minibatch_count_in_its_explained_variance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = [trajectory((1, 0, reward)) for reward in (1.0, 3.0, 9.0)]
    batch = monte_carlo(to_batch(played), played, AlgorithmConfig(preset="st_ppo"))
    value_T = torch.tensor([1.0, 3.0, 0.0])  # a pass over the first two leaves 0 for the third
    monkeypatch.setattr(value_pretraining, "values", lambda *given: value_T)
    packer: Any = None
    scored, explained = measured([], batch, Minibatch((0, 1), ((0, 1),)), packer)
    assert explained == 1 and scored.value_T is value_T


def test_episodes_of_a_task_are_on_one_side_and_the_last_tasks_are_held_out() -> None:
    assert split(["a", "b", "a", "c", "b", "c"], 0.3) == ([0, 1, 2, 4], [3, 5])
    assert split(list(range(20)), 0.1) == (list(range(18)), [18, 19])
    assert split(["a", "a"], 0.1) == ([], [0, 1]), "no task is left to train on, which is refused"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "--critic=.*/none: holds no trajectories/ of a run; record some with `rollout`"),
        ({"algorithm": {"preset": "grpo"}}, "--critic with algorithm.advantage=group: there is no critic"),
        ({"model": {"path": "m", "reference_path": "t"}}, "--critic with model.reference_path=t: the run's"),
        ({"model": {"path": "m", "lora": {"rank": 4}}}, "--critic with model.lora.rank=4: the critic shares"),
    ],
)
def test_what_cannot_train_a_critic_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    config = Config.model_validate({"model": {"path": "m"}} | changes)
    with pytest.raises(ConfigError, match=problem):
        check_pretraining(config, tmp_path / "none")


@pytest.mark.parametrize("field", ["path", "reference_path", "critic_path"])
def test_a_cold_start_does_not_replace_a_model_that_the_configuration_reads(
    tmp_path: Path, field: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = {"path": "m"} | {field: str(tmp_path)}
    config = Config.model_validate({"model": model, "cold_start": {"output": str(tmp_path)}})
    with pytest.raises(ConfigError, match=rf"cold_start.output=.*: is model.{field}; name another folder"):
        check_output(config)
