"""One optimizer step of the critic: clipped squared error of the values at action tokens."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_stppo.algorithm.penalties import clipped_value_loss, weighted_sum
from megatron_stppo.base.types import EstimatedBatch, Minibatch
from megatron_stppo.data.division import Packer, chosen_tokens
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import forward_backward, total
from megatron_stppo.ops.extension import to_device


def critic_step(
    critic: Trainer, batch: EstimatedBatch, minibatch: Minibatch, value_clip: float, packer: Packer
) -> dict[str, float]:
    """Make one optimizer step on the trajectories of the minibatch and return the step's metrics. Collective.

    The loss is the mean over their live action tokens on ALL data-parallel ranks. If the loss or the gradient
    is not finite, the step is skipped on all ranks. Without a live token, weights and optimizer state do not
    change.
    """
    live_T = batch.live_T & chosen_tokens(batch, minibatch.chosen)
    critic.zero()
    loss = value_loss(batch, minibatch.chosen, value_clip)
    records = forward_backward(critic.model, packer.pack(batch, minibatch), loss)
    mean_loss = float(total(records, 1, packer.mesh))
    norm = critic.reduce()
    rate = critic.learning_rate
    stepped = critic.step(norm, finite=math.isfinite(mean_loss), hold=not live_T.any())
    return {
        "critic/loss": mean_loss,
        "critic/gradient_norm": norm,
        "critic/lr": rate,
        "critic/skipped": float(not stepped),
    }


def value_loss(
    batch: EstimatedBatch, chosen: Sequence[int], value_clip: float
) -> Callable[[Tensor, Microbatch], tuple[Tensor, Tensor]]:
    """Return the loss of a step, for forward_backward: its records are the micro-batches' shares [1]."""
    live_T = batch.live_T & chosen_tokens(batch, chosen)
    weight_T = live_T.float() / live_T.sum().clamp(min=1)

    def loss(value_T: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        assert batch.value_T is not None and batch.return_T is not None
        old_T, return_T, weight = (
            to_device(x[microbatch.rows_T], value_T.device) for x in (batch.value_T, batch.return_T, weight_T)
        )
        loss = weighted_sum(clipped_value_loss(value_T, old_T, return_T, value_clip), weight)
        return loss, loss.detach().reshape(1)

    return loss
