"""The sections `update` and `cold_start`: the optimizer steps.

Also where the old policy's log-probs come from, the denominators of the importance ratios.

score: from a forward pass of the trainer before the update.
update: from the update's own forward pass. With one optimizer step per epoch, every trajectory is in the
first step, whose forward pass still uses the old policy. It computes the same log-probs as a pass of its own
would, bit for bit, so training is the same.
behaviour: from the engine, which generated the tokens; the trainer needs no pass.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_stppo.config.algorithm import AlgorithmConfig
from megatron_stppo.config.section import Rule, Section

WARMUP = "share of all updates over which lr rises linearly from 0"
Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam: a decay rate


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """highest learning rate of Adam"""
    warmup_fraction: float = Field(0.0, ge=0, le=1, description=WARMUP)
    weight_decay: float = Field(0.01, ge=0)
    """decoupled weight decay of AdamW"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """decay rates of Adam's two moments"""
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the gradient"""
    distributed: bool = True
    """megatron's distributed optimizer (states sharded over data parallel)"""


class ActorOptimizerConfig(OptimizerConfig):
    warmup_fraction: float = Field(0.285, ge=0, le=1, description=WARMUP)


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-5, gt=0)
    """highest learning rate of Adam"""
    warmup_fraction: float = Field(0.015, ge=0, le=1, description=WARMUP)
    frozen_attention: bool = False
    """keep the weights of its attention layers as they were loaded (SAO, arXiv 2607.07508)"""


class UpdateConfig(Section):
    epochs: int = Field(1, ge=1)
    """passes over the trajectories of an iteration"""
    minibatches: int = Field(2, ge=1)
    """minibatches per epoch; each is one optimizer step"""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """on one rank; a longer trajectory exceeds it"""
    old_logprob: Literal["auto", "score", "update"] = "auto"
    """forward pass for the old policy's log-probs. score: one of its own; update: that of the first step,
    which gives the same numbers; auto: update if minibatches=1, mismatch=off, routing_replay is not
    old_policy and no KL divergence is in the reward"""
    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """compute the common starts of a micro-batch's trajectories once. auto: where possible
    (parallel.context=1, model.layers=local), and for 5 % of the tokens or more"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """to host memory while the engine generates. optimizer: the optimizer's states, and gradients are
    released; all: also the weights, while nothing reads them"""
    logit_rows: int = Field(4096, ge=1)
    """rows of logits in memory at a time; a longer turn exceeds it"""
    critic_only: int = Field(0, ge=0)
    """first iterations, in which the actor's steps are computed but not applied"""
    critic_steps: int = Field(1, ge=1)
    """optimizer steps of the critic per step of the actor"""
    actor: ActorOptimizerConfig = ActorOptimizerConfig()
    critic: CriticOptimizerConfig = CriticOptimizerConfig()

    def optimizer(self, role: str) -> OptimizerConfig:
        """Return the optimizer's settings for a role, "actor" or "critic"."""
        return self.critic if role == "critic" else self.actor


class ColdStartConfig(Section):
    tokens: int | None = Field(None, ge=1)
    """tokens of the file to train on; default: all"""
    batch_tokens: int = Field(16384, ge=1)
    """most tokens per optimizer step over all ranks; each has at least one row"""
    lr: float = Field(1e-3, gt=0)
    """highest learning rate of Adam; a cosine decays it to a tenth"""
    warmup_fraction: float = Field(0.05, ge=0, le=1)
    """share of the steps over which lr rises linearly from 0"""
    weight_decay: float = Field(0.01, ge=0)
    """decoupled weight decay of AdamW"""
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the gradient"""
    context_weight: float = Field(1.0, ge=0)
    """weight of prompts and observations in the loss; turns have 1"""
    output: Path | None = None
    """new Hugging Face folder for the trained model or critic; with model.lora for the adapters"""
    episodes: int = Field(32, ge=0)
    """episodes of data.train that the trained model plays at the end; 0, or without data.train: none, without
    an environment"""
    critic_steps: int = Field(50, ge=1)
    """optimizer steps of --critic, with the settings of update.critic"""
    held_out: float = Field(0.1, gt=0, lt=1)
    """share of the recorded tasks, the last ones, that --critic only measures"""


Source = Literal["score", "update", "behaviour"]


def early_uses(update: UpdateConfig, a: AlgorithmConfig) -> Iterator[Rule]:
    """Return the settings that need the old log-probs before the first step's forward pass."""
    yield Rule(
        update.minibatches > 1,
        f"update.minibatches={update.minibatches}: only the first step of an epoch computes with the old "
        "policy",
        "update.minibatches=1",
    )
    yield Rule(
        a.kl_coefficient > 0 and a.kl_in == "reward",
        f"algorithm.kl_in=reward with algorithm.kl_coefficient={a.kl_coefficient}: the rewards, and so the "
        "advantages, contain the old log-probs",
        "algorithm.kl_in=loss and algorithm.kl_estimator=k3",
    )
    yield _weights(a, "the weights of the loss contain the old log-probs")
    yield _recorded_experts(a)


def trainers_uses(update: UpdateConfig, a: AlgorithmConfig) -> Iterator[Rule]:
    """Return the settings that need old log-probs by the trainer."""
    yield Rule(
        update.old_logprob != "auto",
        f"update.old_logprob={update.old_logprob}: no forward pass computes the old log-probs",
        "update.old_logprob=auto",
    )
    yield _weights(a, "all its weights would be 1, because the old policy is the engine's")
    yield _recorded_experts(a)


def _weights(a: AlgorithmConfig, why: str) -> Rule:
    return Rule(a.mismatch != "off", f"algorithm.mismatch={a.mismatch}: {why}", "algorithm.mismatch=off")


def _recorded_experts(a: AlgorithmConfig) -> Rule:
    return Rule(
        a.routing_replay == "old_policy",
        f"algorithm.routing_replay={a.routing_replay}: the experts to replay are recorded in the pass that "
        "computes the old log-probs",
        "algorithm.routing_replay=off",
    )


def source(update: UpdateConfig, algorithm: AlgorithmConfig) -> Source:
    """Return where the old log-probs come from.

    Example: update.old_logprob=auto gives "update" with one minibatch and no early use, else "score".
    """
    if algorithm.old_policy == "behaviour":
        return "behaviour"
    early = any(rule.broken for rule in early_uses(update, algorithm))
    return "score" if update.old_logprob == "score" or early else "update"


def rules(update: UpdateConfig, algorithm: AlgorithmConfig) -> Iterator[Rule]:
    """Return the rules about algorithm.old_policy and update.old_logprob."""
    if algorithm.old_policy == "behaviour":
        asked, uses, other = "algorithm.old_policy=behaviour", trainers_uses, "algorithm.old_policy=score"
    elif update.old_logprob == "update":
        asked, uses, other = "update.old_logprob=update", early_uses, "update.old_logprob=auto"
    else:
        return
    for rule in uses(update, algorithm):
        yield Rule(rule.broken, f"{asked}: {rule.problem}", f"set {other}, or {rule.remedy}")
