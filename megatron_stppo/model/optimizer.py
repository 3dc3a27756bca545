"""A trained model with its optimizer: reduce, look at the norm, then decide about the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor
from torch.nn.utils import get_total_norm

from megatron_stppo.config import OptimizerConfig
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.collectives import all_reduce_sum, any_rank

if TYPE_CHECKING:
    from megatron_stppo.model.build import TokenModel


class Trainer:
    """megatron's optimizer in three moves, because ST-PPO's scale depends on the gradient norm of the same
    minibatch.

    zero() - forward_backward - norm = reduce() - step(gradient_scale, rate_scale).
    """

    def __init__(
        self, model: Sequence[DistributedDataParallel], settings: OptimizerConfig, total_updates: int
    ) -> None:
        self.model = list(model)  # this rank's chunks
        self.settings = settings
        self.warmup = math.ceil(settings.warmup_fraction * total_updates)
        self.updates = 0  # optimizer steps taken
        self.skipped = 0  # steps refused because something was not finite
        self.optimizer = get_megatron_optimizer(
            _megatron_settings(self.model, settings),
            self.model,
            use_gloo_process_groups=groups.carry_bytes(),
        )
        for group in self.optimizer.param_groups:  # megatron leaves this to its scheduler: no decay on norms
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        self._set_adam_steps(0)

    def zero(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self) -> float:
        """Sums gradients over data parallel (and what else megatron must reduce); returns the global norm,
        unclipped."""
        finalize_model_grads(self.model)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(
        self, norm: float, gradient_scale: float = 1.0, rate_scale: float = 1.0, hold: bool = False
    ) -> bool:
        """Scales, clips by the global norm, steps. Collective over all ranks: if a number is not finite on
        one of them, all refuse, and weights and optimizer stay as they are. With `hold` they do that in any
        case, and only what is not finite is refused."""
        if any_rank(not all(map(math.isfinite, (norm, gradient_scale, rate_scale)))):
            self.skipped += 1
            return False
        if hold:
            return True
        norm *= gradient_scale
        factor = gradient_scale * min(1.0, self.settings.grad_clip / (norm + 1e-6))
        for gradient in self._gradients():
            gradient.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate_scale
        self.optimizer.step_with_ready_grads()
        self.updates += 1
        return True

    @property
    def chunks(self) -> list[TokenModel]:
        """The models themselves, without the wrapper that keeps their gradients."""
        return [chunk.module for chunk in self.model]

    def states(self) -> Iterator[Tensor]:
        """Adam's moments and the parameters that it steps on, which may be the weights themselves."""
        for wrapped in self.optimizer.chained_optimizers:
            for group in wrapped.optimizer.param_groups:
                yield from group["params"]
            for state in wrapped.optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, Tensor) and x.dim() > 0)

    def gradient_buffers(self) -> Iterator[Tensor]:
        """What all main gradients are views of."""
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    @contextlib.contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Whatever is accumulated and reduced inside, the gradients are afterwards what they were before."""
        kept = [gradient.clone() for gradient in self._gradients()]
        yield
        for gradient, before in zip(self._gradients(), kept, strict=True):
            gradient.copy_(before)

    def restore(self, state: dict[str, Any], updates: int, skipped: int, warmup: int) -> None:
        """Takes over what a checkpoint held of the optimizer (megatron's sharded state dict, loaded), and
        the counters."""
        chained = self.optimizer.chained_optimizers  # under expert parallelism two, which megatron numbers
        states = [state] if len(chained) == 1 else [state[number] for number in range(len(chained))]
        moments = [part.pop("param_state", None) for part in states]  # the distributed optimizer's
        if None in moments:
            self.optimizer.load_state_dict(state)
        else:  # the rest of the state is settings, which are this run's, and numbers of this run's optimizers
            for wrapped, own in zip(chained, moments, strict=True):
                for parameter_state in wrapped.optimizer.state.values():
                    parameter_state.pop("step", None)  # megatron would look for it among the moments
                wrapped.load_parameter_state_from_fully_reshardable(own)
        self.updates, self.skipped = updates, skipped
        self.warmup = warmup  # of the run as it was planned: more iterations do not warm up again
        self._set_adam_steps(updates)

    def _set_adam_steps(self, updates: int) -> None:
        # megatron's state_dict expects moments before the first step. Without apex or TransformerEngine it
        # uses torch's AdamW, whose state has a step per parameter; megatron's load_state_dict gives all
        # parameters one shared tensor, which torch would then increment once per parameter. The fused Adams
        # count in the group.
        for wrapped in self.optimizer.chained_optimizers:
            plain = isinstance(wrapped.optimizer, torch.optim.AdamW)
            for group in wrapped.optimizer.param_groups:
                if not plain:
                    group["step"] = updates
                elif all(parameter.device.type == "cpu" for parameter in group["params"]):
                    group["fused"] = True  # one loop per parameter; on CUDA it wants the steps there
                for parameter in group["params"]:
                    state = wrapped.optimizer.state[parameter]
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(moment, torch.zeros_like(parameter))
                    if plain:
                        state["step"] = torch.tensor(float(updates))

    @property
    def learning_rate(self) -> float:
        """Linear warm-up, then constant."""
        return self.settings.lr * min(1.0, (self.updates + 1) / max(1, self.warmup))

    def _gradients(self) -> Iterator[Tensor]:
        for wrapped in self.optimizer.chained_optimizers:
            for parameter in wrapped.get_parameters():
                if parameter.grad is not None:
                    yield parameter.grad


def not_finite(trainers: Mapping[str, Trainer]) -> list[str]:
    """Return the roles whose weights or optimizer state hold infinity or NaN on any rank. Collective.

    Every tensor is read once, and the host waits for the device once.
    """
    largest = [
        get_total_norm(
            (*(p for chunk in trainer.chunks for p in chunk.parameters()), *trainer.states()), math.inf
        )
        for trainer in trainers.values()
    ]
    bad = all_reduce_sum((~torch.stack(largest).isfinite()).int())
    return [role for role, count in zip(trainers, bad.tolist(), strict=True) if count]


def _megatron_settings(
    model: Sequence[DistributedDataParallel], settings: OptimizerConfig
) -> MegatronOptimizerConfig:
    dtype = model[0].config.params_dtype
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
    )
