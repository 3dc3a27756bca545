"""Critic, reference and learning rates: healthy models pass; planted mistakes are found by their checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.critic import CAUSAL, FORMULA, critic
from megatron_stppo.evidence.checks.reference import BEGINS, RATES, STAYS, rates, reference
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel, ValueHead
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.update import critic_step
from tests.evidence.checks import staged
from tests.ranks import run_ranks

Patch = pytest.MonkeyPatch


def clipped_around_the_return(mp: Patch) -> None:
    real = critic_step.clipped_value_loss
    mp.setattr(
        critic_step, "clipped_value_loss", lambda value, old, target, clip: real(value, target, target, clip)
    )


def value_sees_its_token(mp: Patch) -> None:
    real = TokenModel._head

    def head(self: Any, hidden: torch.Tensor, microbatch: Any) -> torch.Tensor:
        if isinstance(self.output_layer, ValueHead):
            later = (microbatch.hidden_index_T + 1).clamp(max=len(hidden) - 1)
            microbatch = replace(microbatch, hidden_index_T=later)
        return real(self, hidden, microbatch)

    mp.setattr(TokenModel, "_head", head)


def rate_decays(mp: Patch) -> None:
    real = Trainer.learning_rate.fget
    mp.setattr(Trainer, "learning_rate", property(lambda self: real(self) * 0.999**self.updates))


def reference_at_another_temperature(mp: Patch) -> None:
    real = Learner.head

    def head(self: Any, model: Any) -> Any:
        factor = 0.7 if model is self.reference else 1.0
        return replace(real(self, model), temperature=factor * real(self, model).temperature)

    mp.setattr(Learner, "head", head)


def reference_follows(mp: Patch) -> None:
    real = Worker.publish

    def publish(self: Any, version: int) -> None:
        real(self, version)
        for own, of_policy in zip(self.learner.reference, self.learner.policy, strict=True):
            own.load_state_dict(of_policy.state_dict())

    mp.setattr(Worker, "publish", publish)


PLANTS = {  # {check: {plant: the line that finds it}}
    critic: {clipped_around_the_return: FORMULA, value_sees_its_token: CAUSAL},
    rates: {rate_decays: RATES},
    # the last plant moves the reference
    reference: {reference_at_another_temperature: BEGINS, reference_follows: STAYS},
}


def _look(path: Path) -> Any:
    def of(stage: Stage) -> Any:
        weights, found = stage.weights(), []
        for check, plants in PLANTS.items():
            named = {plant.__name__: plant for plant in plants}
            found.append(staged.findings(stage, check, named, again=False))
        return found, all(map(torch.equal, weights, stage.weights()))

    return staged.run(of, path, "algorithm.kl_coefficient=0.001", "environment.max_turns=2")


def test_healthy_models_pass_and_each_planted_mistake_is_found(tmp_path: Path) -> None:
    ((every, same),) = run_ranks(_look, 1, staged.write(tmp_path / "project"), timeout=240)
    assert same
    for found, plants in zip(every, PLANTS.values(), strict=True):
        names = {plant: [line.split(":")[0] for line in lines] for plant, lines in found.items()}
        assert names == {"": []} | {plant.__name__: [line] for plant, line in plants.items()}, found
