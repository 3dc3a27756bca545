"""Critic, reference and learning rates: healthy models pass; planted mistakes are found by their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.evidence.bench.definition import value_error
from megatron_stppo.evidence.bench.stage import Checked, Stage
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


PLANTS = {
    clipped_around_the_return: FORMULA,
    value_sees_its_token: CAUSAL,
    rate_decays: RATES,
    reference_at_another_temperature: BEGINS,
    reference_follows: STAYS,  # the last one: afterwards the reference has moved
}


def _checks(stage: Stage) -> Iterator[Checked]:
    for check in (critic, rates, reference):
        yield from check(stage)


def _look(path: Path) -> Any:
    plants = {plant.__name__: plant for plant in PLANTS}

    def of(stage: Stage) -> Any:
        weights, verdicts = stage.weights(), [line.verdict for line in _checks(stage)]
        same = all(map(torch.equal, weights, stage.weights()))
        return staged.findings(stage, _checks, plants, again=False), verdicts, same

    return staged.run(of, path, "algorithm.kl_coefficient=0.001", "environment.max_turns=2")


def test_healthy_models_pass_and_each_planted_mistake_is_found(tmp_path: Path) -> None:
    ((found, verdicts, same),) = run_ranks(_look, 1, staged.write(tmp_path / "project"), timeout=240)
    assert verdicts == ["ok"] * 5 and found.pop("") == [] and same
    names = {plant: [line.split(":")[0] for line in lines] for plant, lines in found.items()}
    assert names == {plant.__name__: [check] for plant, check in PLANTS.items()}, found


def test_a_value_beyond_the_clipping_range_has_no_derivative_if_it_is_nearer_to_the_return() -> None:
    assert value_error(1.0, 0.0, 1.0, 0.5) == (0.125, 0.0)
    assert value_error(1.0, 0.0, -1.0, 0.5) == (2.0, 2.0)
