"""Critic, reference, adapters and rates: healthy models pass; planted mistakes are found by their checks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.adapters import ADDED, added
from megatron_stppo.evidence.checks.critic import BEGINS as CRITIC_BEGINS
from megatron_stppo.evidence.checks.critic import CAUSAL, FORMULA, OBSERVED, READ, critic
from megatron_stppo.evidence.checks.reference import BEGINS, OTHER, RATES, STAYS, rates, reference
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


VALUES_ONE_EARLY = "value_R[action_rows(batch)]", "value_R[(action_rows(batch) - 1).clamp(min=0)]"
value_of_the_token_before = staged.mistaken("training.stages:score", *VALUES_ONE_EARLY)
alpha_over_the_root_of_the_rank = staged.mistaken(
    "model.adapters:Adapter.forward", "* self.scale", "* self.scale * self.a.shape[0] ** 0.5"
)
HALF = "@ self.weight.float()", "* (torch.arange(hidden.shape[-1]) % 2) @ self.weight.float()"
half_of_the_state = staged.mistaken("model.token_model:ValueHead.forward", *HALF)
one_step_of_the_critic = staged.mistaken("training.stages:update", "range(config.update.critic_steps)", "[0]")
Plants = dict[Any, dict[str, tuple[Any, list[str]]]]  # {check: {plant: (it, the lines that find it)}}


def as_the_actor(stage: Stage, model: Any) -> staged.Patch:
    """Return a plant: the embedding of a model is the actor's."""
    own, of_actor = (next(chunks[0].parameters()) for chunks in (model, stage.learner.policy))
    return lambda mp: mp.setattr(own, "data", of_actor.data)


def of_models(stage: Stage) -> Plants:
    assert stage.learner.critic is not None
    return {
        critic: {
            "another critic": (as_the_actor(stage, stage.learner.critic.chunks), [CRITIC_BEGINS]),
            "half of the state": (half_of_the_state, [READ]),
            "critic_steps is ignored": (one_step_of_the_critic, [FORMULA]),
            "clipped around the return": (clipped_around_the_return, [FORMULA]),
            "value sees its token": (value_sees_its_token, [READ, CAUSAL]),
            "value of the token before": (value_of_the_token_before, [OBSERVED]),
        },
        rates: {"rate decays": (rate_decays, [RATES])},
        # the last plant moves the reference
        reference: {
            "another temperature": (reference_at_another_temperature, [BEGINS]),
            "reference follows": (reference_follows, [STAYS]),
        },
    }


def of_adapters(stage: Stage) -> Plants:
    another = as_the_actor(stage, stage.learner.reference)
    return {
        added: {"alpha / rank ** 0.5": (alpha_over_the_root_of_the_rank, [ADDED])},
        reference: {"the policy in place of the teacher": (another, [OTHER])},
    }


def _look(path: Path, planted: Any, *overrides: str) -> Any:
    def of(stage: Stage) -> Any:
        weights, plants = stage.weights(), planted(stage)
        found = [
            staged.findings(stage, check, {name: plant for name, (plant, _) in named.items()}, again=False)
            for check, named in plants.items()
        ]
        lines = [{name: of for name, (_, of) in named.items()} for named in plants.values()]
        return found, lines, all(map(torch.equal, weights, stage.weights()))

    return staged.run(of, path, "algorithm.kl_coefficient=0.001", "environment.max_turns=2", *overrides)


@pytest.mark.parametrize(
    ("planted", "overrides"),
    [
        (of_models, ["model.critic_path=critic", "algorithm.gae_observations=true", "update.critic_steps=2"]),
        (of_adapters, ["model.lora.rank=4", "model.lora.alpha=16", "model.reference_path=critic"]),
    ],
)
def test_healthy_models_pass_and_each_planted_mistake_is_found(
    planted: Any, overrides: list[str], tmp_path: Path
) -> None:
    path = staged.write(tmp_path / "project")
    shutil.copytree(path.parent / "model", path.parent / "critic")
    weights = path.parent / "critic" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    ((every, expected, same),) = run_ranks(_look, 1, path, planted, *overrides, timeout=240)
    assert same
    for found, lines in zip(every, expected, strict=True):
        names = {plant: [line.split(":")[0] for line in of] for plant, of in found.items()}
        assert names == {"": []} | lines, found
