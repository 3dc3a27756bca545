"""The sections `update` and `cold_start`: the optimizer steps."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_stppo.config.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam: a decay rate


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="highest learning rate of Adam")
    warmup_fraction: float = Field(
        0.0, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of Adam's two moments")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    distributed: bool = Field(
        True, description="megatron's distributed optimizer (states sharded over data parallel)"
    )


class ActorOptimizerConfig(OptimizerConfig):
    warmup_fraction: float = Field(
        0.285, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-5, gt=0, description="highest learning rate of Adam")
    warmup_fraction: float = Field(
        0.015, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )
    frozen_attention: bool = Field(
        False,
        description="keep the weights of its attention layers as they were loaded (SAO, arXiv 2607.07508)",
    )


class UpdateConfig(Section):
    epochs: int = Field(1, ge=1, description="passes over the trajectories of an iteration")
    minibatches: int = Field(2, ge=1, description="minibatches per epoch; each is one optimizer step")
    tokens_per_microbatch: int = Field(16384, ge=1, description="on one rank; a longer trajectory exceeds it")
    old_logprob: Literal["auto", "score", "update"] = Field(
        "auto",
        description="forward pass for the old policy's log-probs. score: one of its own; update: that of "
        "the first step, which gives the same numbers; auto: update if minibatches=1, mismatch=off, "
        "routing_replay is not old_policy and no KL divergence is in the reward",
    )
    share_prefixes: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute the common starts of a micro-batch's trajectories once. auto: where possible "
        "(parallel.context=1, model.layers=local), and for 5 % of the tokens or more",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="to host memory while the engine generates. optimizer: the optimizer's states, and "
        "gradients are released; all: also the weights, while nothing reads them",
    )
    logit_rows: int = Field(
        4096, ge=1, description="rows of logits in memory at a time; a longer turn exceeds it"
    )
    critic_only: int = Field(
        0, ge=0, description="first iterations, in which the actor's steps are computed but not applied"
    )
    critic_steps: int = Field(1, ge=1, description="optimizer steps of the critic per step of the actor")
    actor: ActorOptimizerConfig = ActorOptimizerConfig()
    critic: CriticOptimizerConfig = CriticOptimizerConfig()

    def optimizer(self, role: str) -> OptimizerConfig:
        """Return the optimizer's settings for a role, "actor" or "critic"."""
        return self.critic if role == "critic" else self.actor


class ColdStartConfig(Section):
    tokens: int | None = Field(None, ge=1, description="tokens of the file to train on; default: all")
    batch_tokens: int = Field(
        16384, ge=1, description="most tokens per optimizer step over all ranks; each has at least one row"
    )
    lr: float = Field(1e-3, gt=0, description="highest learning rate of Adam; a cosine decays it to a tenth")
    warmup_fraction: float = Field(
        0.05, ge=0, le=1, description="share of the steps over which lr rises linearly from 0"
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    context_weight: float = Field(
        1.0, ge=0, description="weight of prompts and observations in the loss; turns have 1"
    )
    output: Path | None = Field(
        None,
        description="new Hugging Face folder for the trained model or critic; with model.lora for the "
        "adapters",
    )
    episodes: int = Field(
        32,
        ge=0,
        description="episodes of data.train that the trained model plays at the end; 0, or without "
        "data.train: none, without an environment",
    )
    critic_steps: int = Field(
        50, ge=1, description="optimizer steps of --critic, with the settings of update.critic"
    )
    held_out: float = Field(
        0.1, gt=0, lt=1, description="share of the recorded tasks, the last ones, that --critic only measures"
    )
