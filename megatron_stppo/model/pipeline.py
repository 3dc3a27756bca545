"""Runs microbatches through megatron's pipeline schedules, for scoring and for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_stppo.base.types import Batch
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.packing import (
    Microbatch,
    PackingSpec,
    microbatch_runs,
    pack,
    prefixes_of,
    routed,
    unpack,
)
from megatron_stppo.data.prefixes import partition, prompts_of, route_marks
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

Model = Sequence[torch.nn.Module]  # this rank's chunks of one model, in the order of their layers
# the columns of a Batch that decide its microbatches, beside the recorded experts
PACKED = ("tokens_P", "held_N", "action_index_T", "turn_offsets")
Record = TypeVar("Record")  # what is kept of a microbatch: a detached tensor, or several


@dataclass(frozen=True)
class Packer:
    """Cuts this rank's part of a batch into microbatches."""

    spec: PackingSpec
    mesh: MeshRank
    hidden: int  # hidden size of the model, for `cost`
    device: torch.device | str | int
    by_route: bool = False  # prefixes are shared only where their recorded experts agree too
    # {list of trajectories: [(batch, its microbatches)]}, see `keep`; a replaced Packer has its own
    kept: dict[tuple[int, ...], list[tuple[Batch, Sequence[Microbatch]]]] = field(
        default_factory=dict, init=False
    )

    @classmethod
    def of(cls, config: Config, shape: ModelShape, mesh: MeshRank) -> Packer:
        spec = PackingSpec(
            config.update.tokens_per_microbatch,
            mesh.tensor_size if config.parallel.sequence else 1,
            mesh.context_rank,
            mesh.context_size,
            # the interleaved schedule processes groups of microbatches, which must have equal lengths
            in_step=mesh.pipeline_size if mesh.layout.virtual > 1 else 1,
            equal=mesh.layout.virtual > 1,
            share_prefixes=shares_prefixes(config, mesh.layout),
        )
        return cls(spec, mesh, shape.hidden, torch.cuda.current_device(), config.replays_rollout)

    def keep(self, together: Sequence[Sequence[int]]) -> None:
        """Keep the microbatches of these lists of trajectories from now on, and drop those of others.

        So scoring and update of all models pack a minibatch once. They take up to 32 bytes per token on the
        device. Equal on every rank, because `pack` is collective.
        """
        kept = {tuple(chosen): self.kept.get(tuple(chosen), []) for chosen in together}
        self.kept.clear()
        self.kept.update(kept)

    def pack(self, batch: Batch, chosen: Sequence[int], most: int | None = None) -> Sequence[Microbatch]:
        """Return this data-parallel rank's microbatches of the chosen trajectories. Collective.

        most: only so many of each rank's trajectories.
        """
        kept = None if most is not None else self.kept.get(tuple(chosen))
        decisive = (*PACKED, "routes_P") if self.by_route else PACKED
        for given, microbatches in kept or ():
            if all(getattr(given, name) is getattr(batch, name) for name in decisive):
                return routed(microbatches, batch.routes_P, self.device)
        microbatches = self._pack(batch, chosen, most)
        if kept is not None:
            kept.append((batch, microbatches))
        return routed(microbatches, batch.routes_P, self.device)

    def _pack(self, batch: Batch, chosen: Sequence[int], most: int | None) -> Sequence[Microbatch]:
        """Return the microbatches without recorded experts. Collective."""
        partition = [part[:most] for part in self.partition(batch, chosen)]
        mine, spec = partition[self.mesh.data_rank], self.spec
        tree = prefixes_of(batch, mine, spec, self._marks(batch))
        if self.mesh.layout.expert > 1:  # every layer has a collective over the ranks that share its experts
            most_here = all_reduce_max(torch.tensor([len(microbatch_runs(tree, spec))]), self.mesh.data_group)
            spec = replace(spec, in_step=int(most_here))
        return pack(replace(batch, routes_P=None), mine, spec, self.device, tree)

    def _marks(self, batch: Batch) -> Tensor | None:
        """Return the marks of the recorded experts of all layers, equal on every pipeline stage, or None if
        they do not matter. Collective."""
        if not (self.by_route and self.spec.share_prefixes and batch.routes_P is not None):
            return None
        marks_P = route_marks(batch.routes_P, self.mesh.pipeline_rank)
        return all_reduce_sum(marks_P, self.mesh.pipeline_group) if self.mesh.pipeline_size > 1 else marks_P

    def partition(self, batch: Batch, chosen: Sequence[int]) -> list[list[int]]:
        """Return the chosen trajectories of every data-parallel rank, balanced by `cost`."""
        index = torch.tensor(chosen)
        costs = [cost(length, self.hidden) for length in batch.sequence_offsets.diff()[index].tolist()]
        groups = saved = None
        if self.spec.share_prefixes and batch.state_S is not None:  # those of one prompt save its cost
            prompts, groups = prompts_of(batch, index)
            saved = [cost(length, self.hidden) for length in prompts]
        dealt = partition(costs, self.mesh.data_size, groups, saved)
        return [[chosen[i] for i in part] for part in dealt]


def shares_prefixes(config: Config, layout: Layout) -> bool:
    """Return whether microbatches hold common prefixes once. Raises ConfigError if they must and cannot."""
    reason = sharing_obstacle(config, layout)
    if reason and config.update.share_prefixes == "on":
        raise ConfigError(f"update.share_prefixes=on: {reason}; set it to auto")
    return not reason


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


def cost(length: int, hidden: int) -> float:
    """Return the cost of training on a trajectory, up to a constant factor.

    Per token and layer, matrix products take 12 H^2 multiplications, and causal attention takes H times the
    number of tokens before it.
    """
    return length * (12 * hidden + length)


def forward_backward(
    model: Model,
    microbatches: Sequence[Microbatch],
    loss: Callable[[Tensor, Microbatch], tuple[Tensor, Record]],
) -> list[Record]:
    """Add the gradient of the sum of the losses to the main gradients.

    loss(output, microbatch) returns a scalar that already contains its global denominator, and a detached
    record. Return the records, in the order of the microbatches; none except on the last pipeline stage.
    """
    return _run(model, microbatches, loss, forward_only=False)


def evaluate(
    model: Model,
    microbatches: Sequence[Microbatch],
    loss: Callable[[Tensor, Microbatch], tuple[Tensor, Record]],
) -> list[Record]:
    """Return the records of `forward_backward`, without the gradient."""
    with torch.no_grad():
        return _run(model, microbatches, loss, forward_only=True)


def total(records: Sequence[Tensor], size: int, mesh: MeshRank) -> Tensor:
    """Return the sum of all ranks' records [size]: float64 on the host, equal on every rank. Collective."""
    out = torch.zeros(size, dtype=torch.float64)
    if records:
        for record in torch.stack(list(records)).double().cpu():  # the host waits once
            out += record
    dist.all_reduce(out, group=mesh.token_group)
    dist.all_reduce(out, group=mesh.pipeline_group)
    return out


def _run(
    model: Model,
    microbatches: Sequence[Microbatch],
    finish: Callable[[Tensor, Microbatch], tuple[Tensor, Record]],
    forward_only: bool,
) -> list[Record]:
    def on_output(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Record]:
        loss, record = finish(output, microbatch)
        # megatron requires a token count; with calculate_per_token_loss it does not divide by it
        return loss, torch.zeros((), dtype=torch.int, device=output.device), record

    def step(
        source: Iterator[Microbatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Record]]]:
        microbatch = next(source)
        return model(microbatch), partial(on_output, microbatch)

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in model],  # every model chunk processes every microbatch
        model=list(model),
        num_microbatches=len(microbatches),
        seq_length=int(microbatches[0].lengths.sum()),  # unused if stages exchange shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def forward_only(
    model: Model,
    batch: Batch,
    packer: Packer,
    together: Sequence[Sequence[int]],
    answer: Callable[[Tensor, Microbatch], Tensor],
    most: int | None = None,
) -> Tensor:
    """Return one number per action token of the whole batch: float32 [T] on the host, equal on every rank.

    together: lists of trajectories that contain every trajectory once. A microbatch holds trajectories of one
    list only. With the minibatches of an epoch as lists, the microbatches are those of the update. Matrix
    products of other sizes round differently, and the importance ratios of the first minibatch would not be
    exactly 1.
    most: only so many of each data-parallel rank's trajectories of a list; rows of others are 0.
    The work is divided over data parallel ranks. Rows that a rank did not compute are zero, so summing over
    ranks only combines rows. Collective.
    """
    mesh, out_T = packer.mesh, torch.zeros(len(batch.action_index_T))

    def finish(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return output.new_zeros(()), answer(output, microbatch)

    for chosen in together:
        microbatches = packer.pack(batch, chosen, most)
        with torch.no_grad():
            answers = _run(model, microbatches, finish, forward_only=True)
        if mesh.is_last_stage:
            out_T += unpack(microbatches, answers, len(out_T))
    return _put_together(out_T, mesh)


def logprobs(
    model: Model,
    head: PolicyHead,
    batch: Batch,
    packer: Packer,
    together: Sequence[Sequence[int]],
    most: int | None = None,
) -> Tensor:
    """Return log pi(token) of the action tokens at the head's temperature: as `forward_only`.

    together: the minibatches of the update, which compares its log-probs with these.
    """
    return forward_only(model, batch, packer, together, head.logprob, most)


def values(model: Model, batch: Batch, packer: Packer, together: Sequence[Sequence[int]]) -> Tensor:
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
