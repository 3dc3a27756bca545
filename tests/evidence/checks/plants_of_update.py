"""Public bugs of other projects, planted: each function patches the program of a rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

Patch = pytest.MonkeyPatch


def module(name: str) -> Any:
    return import_module(f"megatron_stppo.{name}")


def critic_mean_of_microbatch(patch: Patch) -> None:  # verl #6957
    critic = module("training.update.critic_step")
    real = critic.weighted_sum

    def mean(loss_T, weight_T):
        return real(loss_T, weight_T / weight_T.sum().clamp(min=1e-9))

    patch.setattr(critic, "weighted_sum", mean)


def actor_mean_of_microbatch(patch: Patch) -> None:  # open-instruct #1161, transformers #34191
    loss = module("training.update.actor_step").ActorLoss
    real = loss.__call__

    def call(self, hidden, microbatch):
        own = self.weight_T[microbatch.rows_T].sum().clamp(min=1e-9)
        return real(replace(self, weight_T=self.weight_T / own), hidden, microbatch)

    patch.setattr(loss, "__call__", call)


def divided_by_microbatches(patch: Patch) -> None:  # AReaL #1273
    actor = module("training.update.actor_step")
    real = actor.forward_backward

    def divided(model, microbatches, loss):
        records = real(model, microbatches, loss)
        for chunk in model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.div_(len(microbatches))
        return records

    patch.setattr(actor, "forward_backward", divided)


def doubled_buffer(patch: Patch) -> None:  # Megatron-LM #6660
    actor = module("training.update.actor_step")
    real = actor.forward_backward

    def doubled(model, microbatches, loss):
        def one(hidden, microbatch):
            for chunk in model:
                for buffer in itertools.chain(chunk.buffers, chunk.expert_parallel_buffers):
                    buffer.grad_data.mul_(2)
            return loss(hidden, microbatch)

        return real(model, microbatches, one)

    patch.setattr(actor, "forward_backward", doubled)


def _scaled(patch: Patch, factor: Any) -> None:
    trainer = module("model.optimizer").Trainer
    real = trainer.reduce

    def reduce(self):
        for gradient in self.gradient_buffers():
            gradient.div_(factor())
        return real(self)

    patch.setattr(trainer, "reduce", reduce)


def averaged(patch: Patch) -> None:  # NeMo-RL #1693, torchtune #2172
    _scaled(patch, lambda: module("parallel.groups").parallel_state.get_data_parallel_world_size())


def constant_factor(patch: Patch) -> None:  # every layout has it
    _scaled(patch, lambda: 32)


def unmarked_adapter(patch: Patch) -> None:  # mcore-bridge #173
    adapter = module("model.adapters").Adapter
    real = adapter.__init__

    def begin(self, *given):
        real(self, *given)
        self.a.sequence_parallel = self.b.sequence_parallel = False

    patch.setattr(adapter, "__init__", begin)


def first_cotangent(patch: Patch) -> None:  # Automodel #3853
    surrogate = module("ops.clipped_surrogate")
    real = surrogate.computed

    def computed(*given):
        totals, ratio, gradient_T, bias_T = real(*given)
        return totals, ratio, gradient_T[:1].expand_as(gradient_T).contiguous(), bias_T

    patch.setattr(surrogate, "computed", computed)


def detached_embedding(patch: Patch) -> None:  # SkyRL #2041, Automodel #2931
    model = module("model.token_model").TokenModel
    real = model._preprocess

    def preprocess(self, *given, **by_name):
        embedded, *rest = real(self, *given, **by_name)
        return (embedded.detach() if self.pre_process else embedded), *rest

    patch.setattr(model, "_preprocess", preprocess)


def missing_column(patch: Patch) -> None:  # ms-swift #9947: the head's gradient lacks a part
    head = module("model.policy_head").PolicyHead
    real = head.loss

    def loss(self, hidden, microbatch, terms):
        return real(self, torch.cat([hidden[..., :8].detach(), hidden[..., 8:]], -1), microbatch, terms)

    patch.setattr(head, "loss", loss)


def detached_value(patch: Patch) -> None:  # the critic's trunk gets no gradient
    head = module("model.token_model").ValueHead
    real = head.forward
    patch.setattr(head, "forward", lambda self, hidden: real(self, hidden.detach()))


def ratio_of_one(patch: Patch) -> None:  # higgsfield #20: the old policy is the current one
    loss = module("training.update.actor_step").ActorLoss
    real = loss.surrogate

    def surrogate(self, tokens, **wanted):
        return real(replace(self, batch=replace(self.batch, old_logprob_T=None)), tokens, **wanted)

    patch.setattr(loss, "surrogate", surrogate)


def one_step_ahead(patch: Patch) -> None:  # Megatron-LM #5976
    trainer = module("model.optimizer").Trainer
    real = trainer._set_adam_steps
    patch.setattr(trainer, "_set_adam_steps", lambda self, updates: real(self, updates + 1))


def norms_decay(patch: Patch) -> None:  # NeMo Speech #12123
    trainer = module("model.optimizer").Trainer
    real = trainer._configure

    def configure(self):
        real(self)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.settings.weight_decay

    patch.setattr(trainer, "_configure", configure)


def no_warmup(patch: Patch) -> None:  # NeMo-RL #2530
    trainer = module("model.optimizer").Trainer
    patch.setattr(trainer, "learning_rate", property(lambda self: self.settings.lr))


def norm_without_one(patch: Patch) -> None:  # Megatron-LM #7452
    optimizer = module("model.optimizer")
    real = optimizer._norm_of
    patch.setattr(optimizer, "_norm_of", lambda tensors: real(tensors[1:]))


def skipped_tensor(patch: Patch) -> None:  # a parameter has no gradient when the optimizer steps
    trainer = module("model.optimizer").Trainer
    real = trainer.step

    def step(self, *given, **by_name):
        list(self._gradients())[-1].zero_()
        return real(self, *given, **by_name)

    patch.setattr(trainer, "step", step)


def first_clipped(patch: Patch) -> None:  # and then scaled by the correction
    trainer = module("model.optimizer").Trainer
    real = trainer.step

    def step(self, norm, scale=1.0, *given, **by_name):
        for gradient in self._gradients():
            gradient.mul_(min(1.0, self.settings.grad_clip / norm))
        return real(self, min(norm, self.settings.grad_clip), scale, *given, **by_name)

    patch.setattr(trainer, "step", step)
