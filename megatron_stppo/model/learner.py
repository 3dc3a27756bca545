"""One rank's share of the models without the engine: everything that scoring and updating need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.division import Packer
from megatron_stppo.model import build
from megatron_stppo.model.offload import Offloader, Phase
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import packer_of
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.model.token_model import TokenModel, frozen
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_files import head_of_critic
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape


@dataclass
class Learner:
    """The models of one rank, and what loads them, packs their batches and offloads their memory."""

    config: Config
    mesh: MeshRank
    shape: ModelShape
    policy: list[TokenModel]  # the model that an engine serves
    actor: Trainer | None  # the policy with its optimizer; None for evaluation
    critic: Trainer | None  # None for group-normalised advantages, and for evaluation
    reference: list[TokenModel] | None  # None without a KL penalty
    packer: Packer
    offloader: Offloader

    @property
    def trainers(self) -> dict[str, Trainer]:
        given = {"actor": self.actor, "critic": self.critic}
        return {role: trainer for role, trainer in given.items() if trainer is not None}

    @property
    def usual_deviation(self) -> float:
        """StepMemory.deviation of the actor; 0 without one."""
        return self.actor.memory.deviation if self.actor is not None else 0.0

    @cached_property
    def reference_shape(self) -> ModelShape:
        """The shape of the KL reference, also if it is not built."""
        return _reference_shape(self.config, self.shape)

    @cached_property
    def beginning(self) -> dict[str, str]:
        """What the state of a checkpoint has of the weights that the run began with and of the KL reference:
        hashes of model.path, of model.critic_path ("" without one) and, if given, of model.reference_path.
        Collective."""
        model, shape = self.config.model, self.shape
        begun = {"begun_with": weights_digest(model.path, shape), "critic_begun_with": ""}
        if self.config.needs_critic and (path := model.critic_path) is not None:
            begun["critic_begun_with"] = weights_digest(path, shape, head_of_critic(path))
        if model.reference_path is not None:
            begun["reference"] = weights_digest(model.reference_path, self.reference_shape)
        return begun

    def check_beginning(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if the run of a checkpoint with this state began with other weights than those of
        model.path, or its critic with others than those of model.critic_path, or had another KL reference.
        Checkpoints of converted models do not record them."""
        model, now = self.config.model, self.beginning
        begun = now["begun_with"]
        if state.get("critic_begun_with", now["critic_begun_with"]) != now["critic_begun_with"]:
            raise ConfigError(
                f"model.critic_path={model.critic_path}: the run's critic began with other weights; give the "
                "folder that it began with (null if none), or another run.name"
            )
        if state.get("begun_with", begun) != begun:
            raise ConfigError(
                f"model.path={model.path}: holds other weights than those that the run began "
                "with, which are its KL reference and its version 0; give that model, or another run.name"
            )
        before = state.get("reference", state.get("begun_with"))
        if self.reference is not None and before not in (None, now.get("reference", begun)):
            raise ConfigError(
                f"model.reference_path={model.reference_path}: holds other weights than the KL reference "
                "that the run began with; give that model, or another run.name"
            )

    def load_for(self, phase: Phase) -> None:
        """Load what the phase needs from host memory and offload the rest."""
        self.offloader.to(phase)

    def head(self, model: Sequence[torch.nn.Module]) -> PolicyHead:
        """Return the head that computes log-probs from the last layer of actor or reference."""
        on_gpu = torch.cuda.is_available()
        shape = self.reference_shape if model is self.reference else self.shape
        return PolicyHead.configured(model, self.mesh, shape.vocab, self.config, on_gpu)


def build_learner(
    config: Config, shape: ModelShape, mesh: MeshRank, dtype: torch.dtype, training: bool = True
) -> Learner:
    """Build the models of this rank. Collective.

    `training=False` leaves optimizers, critic and reference out. With adapters, critic and reference share
    the actor's frozen weights, except a reference of model.reference_path.
    """
    actor = critic = reference = None
    if training:
        actor = build.trainer("actor", shape, config, mesh, dtype)
        policy = actor.chunks
    else:
        policy = build.from_hf("actor", shape, config, mesh, dtype)
    trunk = policy if config.model.lora.rank else None
    if training and config.needs_critic:
        critic = build.trainer("critic", shape, config, mesh, dtype, trunk)
    if training and config.needs_reference:
        of = config.of_reference
        shared = trunk if of is config else None
        reference = build.from_hf("reference", _reference_shape(config, shape), of, mesh, dtype, shared)
    trainers = {role: t for role, t in (("actor", actor), ("critic", critic)) if t is not None}
    offloader = Offloader(trainers, reference, config.update.offload, partial(frozen, trunk or ()))
    packer = packer_of(config, shape, mesh)
    learner = Learner(config, mesh, shape, policy, actor, critic, reference, packer, offloader)
    if training:  # kept: when a checkpoint is saved, the folders can be away
        _ = learner.beginning
    return learner


def _reference_shape(config: Config, shape: ModelShape) -> ModelShape:
    return shape if config.of_reference is config else read_shape(config.of_reference.model.path)
