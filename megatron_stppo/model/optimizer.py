"""A trained model with its optimizer. The gradient norm is available before the step is taken."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor
from torch.nn.utils import get_total_norm

from megatron_stppo.algorithm.rate import StepMemory
from megatron_stppo.config import OptimizerConfig
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.collectives import all_reduce_sum, any_rank

MOMENTS = ("exp_avg", "exp_avg_sq")  # their names in the optimizer's state


class Trainer:
    """megatron's optimizer, with the gradient reduction and the step as two separate calls.

    ST-PPO scales the gradient by a factor that depends on the gradient norm of the same minibatch.
    Order of calls: zero(), forward_backward(), norm = reduce(), step(norm, gradient_scale, rate_scale).
    """

    def __init__(
        self,
        model: Sequence[DistributedDataParallel],
        settings: OptimizerConfig,
        iterations: int,
        updates_each: int = 1,
    ) -> None:
        """iterations: those that the warm-up is a share of, of `updates_each` optimizer steps."""
        self.model = list(model)  # this rank's chunks
        self.settings = settings
        self.iterations, self._updates_each = iterations, updates_each
        self.updates = 0  # optimizer steps taken
        self.skipped = 0  # steps not taken because a number was not finite
        self.memory = StepMemory()  # the actor's
        dtype = self.model[0].config.params_dtype
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                clip_grad=settings.grad_clip,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=settings.distributed,
            ),
            self.model,
            use_gloo_process_groups=groups.carry_bytes(),
        )
        self._configure()
        self._set_adam_steps(0)

    def zero(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self) -> float:
        """Sum gradients over data parallel ranks (and do megatron's other reductions). Return the global
        norm before clipping."""
        finalize_model_grads(self.model)
        self.optimizer.prepare_grads()
        return self._norm()

    def step(
        self,
        norm: float,
        gradient_scale: float = 1.0,
        rate_scale: float = 1.0,
        *,
        finite: bool = True,
        hold: bool = False,
    ) -> bool:
        """Scale the gradients, clip them by the global norm and take an optimizer step. Collective.

        Return False, and change neither weights nor optimizer, if norm or scales are not finite, or `finite`
        is False, on any rank. finite: whether the caller's other numbers, such as the loss, are finite.
        With hold=True nothing is changed either, but the result is True if all numbers are finite.
        """
        if any_rank(not (finite and all(map(math.isfinite, (norm, gradient_scale, rate_scale))))):
            self.skipped += 1
            return False
        if hold:
            return True
        norm *= gradient_scale
        factor = gradient_scale * min(1.0, self.settings.grad_clip / (norm + 1e-6))
        if gradients := list(self._gradients()):
            torch._foreach_mul_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate_scale
        self.optimizer.step_with_ready_grads()
        self.updates += 1
        return True

    @property
    def chunks(self) -> list[TokenModel]:
        """The model chunks without megatron's data-parallel wrapper."""
        return [chunk.module for chunk in self.model]

    def states(self) -> Iterator[Tensor]:
        """Yield Adam's moments and the optimizer's parameters, which may be the model's weights."""
        for wrapped in self.optimizer.chained_optimizers:
            for group in wrapped.optimizer.param_groups:
                yield from group["params"]
            for state in wrapped.optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, Tensor) and x.dim() > 0)

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that all main gradients are views of."""
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    @contextlib.contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Context manager that restores the gradients on exit to their values on entry."""
        kept = [gradient.clone() for gradient in self._gradients()]
        yield
        for gradient, before in zip(self._gradients(), kept, strict=True):
            gradient.copy_(before)

    def restore(
        self,
        state: dict[Any, Any] | None,
        updates: int,
        skipped: int,
        memory: Mapping[str, Any],
        iterations: int,
    ) -> None:
        """Restore the optimizer's state and the counters from a checkpoint.

        state: megatron's sharded state dict, loaded; None if the states were loaded in place. memory: the
        fields of a StepMemory. iterations: with which the run began: more of them do not change the warm-up,
        but its other settings do.
        """
        if state is not None:
            self.optimizer.load_state_dict(state)
        self.updates, self.skipped, self.iterations = updates, skipped, iterations
        self.memory = StepMemory(**memory)
        self._configure()
        self._set_adam_steps(updates)

    @property
    def warmup(self) -> int:
        """The length of the warm-up, in optimizer steps."""
        return math.ceil(self.settings.warmup_fraction * (self.iterations * self._updates_each))

    def _configure(self) -> None:
        """Set the fields of `settings` that megatron's state has too: a checkpoint may have other values."""
        for group in self.optimizer.param_groups:
            group["betas"] = self.settings.betas
            # in megatron the scheduler sets the weight decay; wd_mult is 0 for norms
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]

    def _set_adam_steps(self, updates: int) -> None:
        # megatron's state_dict expects the moments to exist before the first step. Without apex or
        # TransformerEngine, megatron uses torch's AdamW, whose state has a step count per parameter.
        # megatron's load_state_dict gives all parameters one shared tensor, which torch would increment once
        # per parameter. The Adam of apex and of TransformerEngine counts steps per parameter group.
        for wrapped in self.optimizer.chained_optimizers:
            plain = isinstance(wrapped.optimizer, torch.optim.AdamW)
            for group in wrapped.optimizer.param_groups:
                if not plain:
                    group["step"] = updates
                else:
                    # One loop per parameter. Not on CUDA, where it requires the step counts on the device.
                    on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
                    group["fused"] = True if on_cpu else None
                for parameter in group["params"]:
                    state = wrapped.optimizer.state[parameter]
                    for moment in MOMENTS:
                        state.setdefault(moment, torch.zeros_like(parameter))
                    if plain:
                        state["step"] = torch.tensor(float(updates))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step: linear warm-up, then constant."""
        return self.settings.lr * min(1.0, (self.updates + 1) / max(1, self.warmup))

    @torch.no_grad()
    def _norm(self) -> float:
        """Return the global norm of the gradients. Collective. The host waits for the device once.

        The result is that of megatron's get_grad_norm, which without TransformerEngine and apex reads one
        number per tensor back to the host.
        """
        parts: Sequence[Any] = self.optimizer.chained_optimizers
        gradients = [part.get_main_grads_for_grad_norm() for part in parts]
        if self.optimizer.grads_states_parallel_group_is_shared():
            parts, gradients = parts[:1], [[gradient for some in gradients for gradient in some]]
        squares = []
        for part, some in zip(parts, gradients, strict=True):
            square = _norm_of(some) ** 2
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
            squares.append(square)
        norms = [square**0.5 for square in torch.stack(squares).tolist()]
        return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))

    def _gradients(self) -> Iterator[Tensor]:
        for wrapped in self.optimizer.chained_optimizers:
            for parameter in wrapped.get_parameters():
                if parameter.grad is not None:
                    yield parameter.grad


def _norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all numbers of the tensors, 0-d float64.

    The host adds up float32 one number after the other, which is 0.17 % too low for 28 million; it gets
    float64. A GPU adds up in a tree.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    if tensors[0].device.type == "cpu":
        return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]).norm()
    return get_total_norm(tensors).double()


def trained(chunk: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a model chunk that an optimizer changes."""
    return (parameter for parameter in chunk.parameters() if parameter.requires_grad)


def not_finite(trainers: Mapping[str, Trainer]) -> list[str]:
    """Return the roles whose trained weights or optimizer state hold infinity or NaN on any rank. Collective.

    Every tensor is read once, and the host waits for the device once.
    """
    largest = [
        get_total_norm(
            (*(p for chunk in trainer.chunks for p in trained(chunk)), *trainer.states()), math.inf
        )
        for trainer in trainers.values()
    ]
    bad = all_reduce_sum((~torch.stack(largest).isfinite()).int())
    return [role for role, count in zip(trainers, bad.tolist(), strict=True) if count]
