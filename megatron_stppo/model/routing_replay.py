"""Routing Replay: records the experts chosen in one pass and uses them in another (arXiv 2507.18071, 5.3).

An optimizer step changes the router too. If the update routes a token to other experts than the old policy
did, the importance ratio compares two networks that use different weights for that token. Therefore the
experts are recorded while the old policy's log-probs are computed, and replayed in every update on that
batch (R2); or the experts that the engine chose during the rollout are replayed in scoring and update (R3,
arXiv 2510.11370). The weights of the replayed experts come from the current router, and gradients flow
through them.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_stppo.data.packing import Microbatch
from megatron_stppo.data.routes import dtype_of
from megatron_stppo.parallel.groups import MeshRank


class Choice:
    """The recorded and replayed experts of one router, used in place of megatron's RouterReplay.

    Experts are int64 [tokens, k].
    """

    def __init__(self) -> None:
        # experts to use in the current pass; where -1, or for all tokens if None: those with the best scores
        self.replayed: Tensor | None = None
        self.recorded: list[Tensor] | None = None  # one per microbatch; None: not recording
        self.trains = False  # a backward pass follows the current pass
        self._again: deque[Tensor] = deque()  # for layers that are recomputed in the backward pass

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: object, group_topk: object, best: Callable[..., tuple]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts, and the chosen experts. megatron calls this instead of
        top-k."""
        chosen: Tensor = best(scores, topk, num_groups, group_topk)[1]
        if self.replayed is not None:
            replayed = self._replay(self.replayed)
            chosen = torch.where(replayed < 0, chosen, replayed)
        elif self.recorded is not None:
            self.recorded.append(chosen)
        return scores.gather(1, chosen), chosen

    def _replay(self, chosen: Tensor) -> Tensor:
        # A layer with recomputation runs first without gradients, later with them, in the same order of
        # microbatches. At that time `replayed` may already belong to a later microbatch.
        if self.trains and not torch.is_grad_enabled():
            self._again.append(chosen)
        elif self._again:
            return self._again.popleft()
        return chosen


class Routing:
    """The routers of one model chunk, in the order of their layers."""

    def __init__(self, chunk: Any, mesh: MeshRank, first_layer: int = 0) -> None:
        """first_layer: index of the chunk's first router among those of this rank."""
        self.mesh, self._first_layer = mesh, first_layer
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.choices = [Choice() for _ in routers]
        for router, choice in zip(routers, self.choices, strict=True):
            router.router_replay = choice
        self.layers = [int(router.layer_number) - 1 for router in routers]  # indices in the whole model
        self.rows: list[Tensor] | None = None  # while recording: the rows_P of each microbatch
        self.repeated: list[Tensor] = []  # and its `repeated`, if it has any
        self._shared = chunk.config.sequence_parallel

    def begin(self, microbatch: Microbatch) -> None:
        """Prepare a forward pass: replay the microbatch's routes, if it has any."""
        routes = None if microbatch.routes_P is None else self._own(microbatch.routes_P).long()
        if self.rows is not None:
            self.rows.append(self._own(microbatch.rows_P))
            self.repeated += [] if microbatch.repeated is None else [microbatch.repeated]
        for layer, choice in enumerate(self.choices, self._first_layer):
            choice.replayed = None if routes is None else routes[:, layer]
            choice.trains = torch.is_grad_enabled()

    def _own(self, value_P: Tensor) -> Tensor:
        """Return the part of `value_P` for the packed tokens that this tensor rank's router processes."""
        if not self._shared:
            return value_P
        return value_P.chunk(self.mesh.tensor_size)[self.mesh.tensor_rank]


def attach(model: Sequence[Any], mesh: MeshRank) -> None:
    """Enable recording and replay for the model chunks (TokenModel) of one rank."""
    first = 0
    for chunk in model:
        chunk.routing = Routing(chunk, mesh, first)
        first += len(chunk.routing.choices)


def routed_layers(model: Sequence[Any]) -> list[int]:
    """Return the indices, in the whole model, of the layers of Batch.routes_P on this rank."""
    return [layer for chunk in model if chunk.routing is not None for layer in chunk.routing.layers]


class Record:
    """The experts chosen inside a `recording` block."""

    def __init__(self, parts: Sequence[Routing], experts: int) -> None:
        self._parts, self._experts = parts, experts

    def routes(self, tokens: int) -> Tensor:
        """Return the experts of the batch's tokens_P: [tokens, layers of this rank's chunks, k] on the host.

        Collective over the ranks that train on the same trajectories. Rows that a rank did not compute are
        zero, so summing over ranks only combines rows; rows that none of these ranks computed stay zero.
        """
        dtype = dtype_of(self._experts)
        group = self._parts[0].mesh.tensor_and_context_group
        layers = []
        for part in self._parts:
            assert part.rows is not None
            rows = torch.cat(part.rows)
            own = rows >= 0
            for choice in part.choices:
                assert choice.recorded is not None
                chosen = torch.cat(choice.recorded).to(dtype)
                out = chosen.new_zeros(tokens, chosen.shape[1])
                out[rows[own].to(out.device)] = chosen[own.to(out.device)]
                dist.all_reduce(out, group=group)
                layers.append(out.cpu())
                for repeated, computed in part.repeated:
                    layers[-1][repeated] = layers[-1][computed]
        return torch.stack(layers, dim=1)


@contextlib.contextmanager
def recording(model: Sequence[Any]) -> Iterator[Record | None]:
    """Context manager that records the experts chosen by the chunks' routers.

    It yields a Record, or None if `attach` was not called on the model.
    """
    parts = [chunk.routing for chunk in model if chunk.routing is not None]
    if not parts:
        yield None
        return
    for part in parts:
        part.rows, part.repeated = [], []
        for choice in part.choices:
            choice.recorded = []
    yield Record(parts, model[0].config.num_moe_experts)
    for part in parts:
        part.rows = None
        for choice in part.choices:
            choice.recorded = None
