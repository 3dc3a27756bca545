"""Runs microbatches through megatron's pipeline schedules, for scoring and for training."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_stppo.base.types import Batch, Minibatch
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.division import Packer
from megatron_stppo.data.packing import Microbatch, unpack
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

Model = Sequence[torch.nn.Module]  # this rank's chunks of one model, in the order of their layers
Record = TypeVar("Record")  # what is kept of a microbatch: a detached tensor, or several


def packer_of(config: Config, shape: ModelShape, mesh: MeshRank) -> Packer:
    """Return the packer of a model of this shape. Raises ConfigError if update.share_prefixes must and cannot
    be on."""
    reason = sharing_obstacle(config, mesh.layout)
    if reason and config.update.share_prefixes == "on":
        raise ConfigError(f"update.share_prefixes=on: {reason}; set it to auto")
    return Packer.of(config, shape.hidden, mesh, share_prefixes=not reason)


def sharing_obstacle(config: Config, layout: Layout) -> str:
    """Return why microbatches do not hold common prefixes once, or "" if they do."""
    if config.update.share_prefixes == "off":
        return "update.share_prefixes=off"
    if layout.context > 1:
        return f"parallel.context={layout.context}: the pieces of context parallelism are cut evenly"
    if layer_spec(config) != "local":
        return "TransformerEngine's attention takes no keys of another sequence; model.layers=local does"
    models = (config.model.path, config.model.reference_path)  # the critic has the shape of the actor
    if any(read_shape(path).recurrent_layers for path in models if path is not None):
        return "recurrent layers keep a state for each trajectory, and no state where trajectories part"
    return ""


def forward_backward(
    model: Model,
    microbatches: Sequence[Microbatch],
    loss: Callable[[Tensor, Microbatch], tuple[Tensor, Record]],
    *,
    trains: bool = True,
) -> list[Record]:
    """Add the gradient of the sum of the losses to the main gradients; not if `trains` is False.

    loss(output, microbatch) returns a scalar that already contains its global denominator, and a detached
    record. Return the records, in the order of the microbatches; none except on the last pipeline stage.
    """

    def on_output(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Record]:
        of_microbatch, record = loss(output, microbatch)
        # megatron requires a token count; with calculate_per_token_loss it does not divide by it
        return of_microbatch, torch.zeros((), dtype=torch.int, device=output.device), record

    def step(
        source: Iterator[Microbatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Record]]]:
        microbatch = next(source)
        return model(microbatch), partial(on_output, microbatch)

    with contextlib.nullcontext() if trains else torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(microbatches) for _ in model],  # every model chunk processes every microbatch
            model=list(model),
            num_microbatches=len(microbatches),
            seq_length=int(microbatches[0].lengths.sum()),  # unused if stages exchange shapes
            micro_batch_size=1,
            forward_only=not trains,
        )


def total(records: Sequence[Tensor], size: int, mesh: MeshRank) -> Tensor:
    """Return the sum of all ranks' records [size]: float64 on the host, equal on every rank. Collective."""
    out = torch.zeros(size, dtype=torch.float64)
    if records:
        for record in torch.stack(list(records)).double().cpu():  # the host waits once
            out += record
    dist.all_reduce(out, group=mesh.token_group)
    dist.all_reduce(out, group=mesh.pipeline_group)
    return out


def forward_only(
    model: Model,
    batch: Batch,
    packer: Packer,
    together: Sequence[Minibatch],
    answer: Callable[[Tensor, Microbatch], Tensor],
) -> Tensor:
    """Return one number per action token of the whole batch: float32 [T] on the host, equal on every rank.

    together: minibatches without a common trajectory; rows of other trajectories are 0. With the minibatches
    of an epoch, the microbatches are those of the update.
    The work is divided over data parallel ranks. Rows that a rank did not compute are zero, so summing over
    ranks only combines rows. Collective.
    """
    mesh, out_T = packer.mesh, torch.zeros(len(batch.action_index_T))

    def finish(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return output.new_zeros(()), answer(output, microbatch)

    for minibatch in together:
        microbatches = packer.pack(batch, minibatch)
        answers = forward_backward(model, microbatches, finish, trains=False)
        if mesh.is_last_stage:
            out_T += unpack(microbatches, answers, len(out_T))
    return _put_together(out_T, mesh)


def logprobs(
    model: Model, head: PolicyHead, batch: Batch, packer: Packer, together: Sequence[Minibatch]
) -> Tensor:
    """Return log pi(token) of the action tokens at the head's temperature: as `forward_only`."""
    return forward_only(model, batch, packer, together, head.logprob)


def values(model: Model, batch: Batch, packer: Packer, together: Sequence[Minibatch]) -> Tensor:
    """Return the critic's value at every action token: as `forward_only`.

    The value of a token is read from the hidden state that predicts the token: the return that the critic
    predicts before the token is generated.
    """
    return forward_only(model, batch, packer, together, lambda value_T, microbatch: value_T)


def gather(
    microbatches: Sequence[Microbatch], values: Sequence[Tensor], total: int, mesh: MeshRank
) -> Tensor:
    """Return the values [T_i] of all ranks' microbatches in the rows of the Batch. Collective.

    The result is float32 [total] on the host, equal on every rank; rows of no microbatch are 0. `values` is
    empty except on the last pipeline stage.
    """
    out_T = unpack(microbatches, values, total) if mesh.is_last_stage else torch.zeros(total)
    return _put_together(out_T, mesh)


def _put_together(out_T: Tensor, mesh: MeshRank) -> Tensor:
    """Combine the rows of all ranks, in place: `out_T` becomes equal on every rank. Collective.

    out_T: [T] on the host; 0 in the rows that this rank did not compute.
    """
    dist.all_reduce(out_T, group=mesh.token_group)
    dist.all_reduce(out_T, group=mesh.pipeline_group)
    return out_T
