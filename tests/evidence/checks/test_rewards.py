from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.data import exchange, packing
from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.rewards import landing
from megatron_stppo.rollout.episodes.episode import History
from tests.evidence.checks import staged
from tests.ranks import run_ranks

CREDIT = "rollout.episodes.episode:History.credit"
advantage: Any = import_module("megatron_stppo.training.advantage")


def one_token_late(mp: pytest.MonkeyPatch) -> None:
    """trl #5338."""
    real = packing.without_tokens

    def late(*given: Any) -> Any:
        batch = real(*given)
        return replace(batch, reward_T=batch.reward_T.roll(1))

    mp.setattr(packing, "without_tokens", late)
    mp.setattr(exchange, "without_tokens", late)


def lost_before_an_observation(mp: pytest.MonkeyPatch) -> None:
    """miles #1827."""
    real = History.observe

    def lost(self: History, ids: Any) -> None:
        self.credit(0.0)
        real(self, ids)

    mp.setattr(History, "observe", lost)


def for_the_turn_before(mp: pytest.MonkeyPatch) -> None:
    """verl #6310."""

    def before(self: History, reward: float) -> None:
        if self.turns:
            at = max(0, len(self.turns) - 2)
            self.turns[at] = replace(self.turns[at], reward=reward)

    mp.setattr(History, "credit", before)


STEP = "environments.rewarded:Rewarded.step"
PLANTS: Any = {
    **{one.__name__: one for one in (one_token_late, lost_before_an_observation, for_the_turn_before)},
    "negative rewards become 0": staged.mistaken(CREDIT, "=reward", "=max(0.0, reward)"),
    "rewards lose their signs": staged.mistaken(CREDIT, "=reward", "=abs(reward)"),
    "rewards are whole numbers": staged.mistaken(
        "environments.contract:_reward", "return number", "return float(round(number))"
    ),
    "a function adds to the reward": staged.mistaken(STEP, "d=reward", "d=self._last.reward + reward"),
    "a function gets one turn less": staged.mistaken(STEP, "list(self._turns)", "self._turns[:-1]"),
    "a function gets the first turn": staged.mistaken(STEP, "list(self._turns)", "self._turns[:1]"),
}
OWN = "def brief(task, turns, result): return {'reward': result.reward - 0.125 * len(turns), 'turns': 1}"


def look(stage: Stage) -> Any:
    make = stage.rollouts.make_environment
    ignored = {
        "a function is ignored": lambda mp: mp.setattr(
            stage.rollouts, "make_environment", lambda: make()._environment
        )
    }
    return staged.findings(stage, landing, PLANTS | ignored)


def test_planted_faults_of_rewards_are_found_and_healthy_ones_are_not(tmp_path: Path) -> None:
    path = staged.write(tmp_path / "project")
    (path.parent / "own.py").write_text(OWN)
    overrides = ("rollout.samples_per_task=4", "environment.reward=own:brief")
    (found,) = run_ranks(staged.run, 1, look, path, *overrides, timeout=240)
    assert found.pop("") == [] and len(found) == len(PLANTS) + 1
    assert all(lines and lines[0].startswith("rewards land") for lines in found.values()), found
