"""The link over which weights go from the trainer's ranks to those of one replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_stppo.learner import Learner
from megatron_stppo.messages import one_line
from megatron_stppo.model import build
from megatron_stppo.parallel import bridge
from megatron_stppo.parallel.raise_together import by_rank, raise_together
from megatron_stppo.reshard.resharder import Resharder, SyncReport
from megatron_stppo.serving.messages import Offer
from megatron_stppo.sharding.hf_names import ModelShape
from megatron_stppo.sharding.spans import row_widths, serving_layouts, training_layouts

if TYPE_CHECKING:
    from megatron_stppo.rollout.engine import Engine

T = TypeVar("T")


class ReplicaLost(RuntimeError):
    """A replica did not take part in a transfer of weights. All of the trainer's ranks raise it together."""


class Link:
    """The process group of the trainer and one replica, and the reshard over it.

    Collective over the ranks of both. The trainer's ranks come first in the group.
    """

    def __init__(
        self,
        offer: Offer,
        store: dist.Store,
        place: int,
        tensor: int,
        own_first: int,
        shape: ModelShape,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        timeout: timedelta,
    ) -> None:
        """place: of this rank in the group. tensor: ranks of the replica. own_first: see bridge.join."""
        trainers = offer.layout.world
        self._group: dist.ProcessGroup | None = bridge.join(
            store, offer.group, place, trainers + tensor, own_first, timeout
        )
        serving = serving_layouts(shape, tensor, tensor)
        self._reshard: Resharder | None = None
        try:
            self._reshard = Resharder(
                source,
                target,
                training_layouts(shape, offer.layout, spec=offer.spec),
                {trainers + rank: spans for rank, spans in serving.items()},
                row_widths(shape),
                group=self._group,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_trainer(
        cls, learner: Learner, offer: Offer, tensor: int, store: dist.Store, timeout: timedelta
    ) -> Link:
        """Build the trainer's end. Raises ReplicaLost on all of the trainer's ranks if it fails on any."""
        source, shape, place = build.named_parameters(learner.policy), learner.shape, learner.mesh.rank
        return _all_or_none(lambda: cls(offer, store, place, tensor, 0, shape, source, {}, timeout))

    @classmethod
    def from_replica(cls, engine: Engine, shape: ModelShape, offer: Offer, timeout: timedelta) -> Link:
        """Build the replica's end. From now on the engine generates only with weights of this link."""
        store = bridge.connect_store(offer.host, offer.port, timeout)
        trainers, tensor = offer.layout.world, dist.get_world_size()
        place = trainers + dist.get_rank()
        link = cls(offer, store, place, tensor, trainers, shape, {}, engine.parameters(), timeout)
        assert link._reshard is not None
        engine.published = link._reshard.published
        return link

    def send(self, version: int) -> SyncReport:
        """Send the weights as `version`. On the trainer's ranks; raises ReplicaLost on all of them."""
        return _all_or_none(lambda: self.sync(version), self.close)

    def sync(self, version: int) -> SyncReport:
        """Receive the weights of `version`. On the replica's ranks; raises what the reshard raises."""
        assert self._reshard is not None, "the link is closed"
        return self._reshard.sync(version)

    def close(self) -> None:
        """Close this rank's connections, so that the ranks that wait for it in the group fail too."""
        group, self._group, self._reshard = self._group, None, None
        if group is not None:
            bridge.leave(group)


def _all_or_none(call: Callable[[], T], on_error: Callable[[], None] = lambda: None) -> T:
    """Return call(), or raise ReplicaLost on all of the trainer's ranks if it failed on any. Collective.

    The error itself is dropped before the ranks agree, because its stack refers to the group: a group that is
    referred to keeps its connections, in which other ranks may wait.
    """
    why: str | None = None
    result: T | None = None
    try:
        result = call()
    except (RuntimeError, ValueError) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        on_error()
    raise_together(why, lambda found: ReplicaLost(by_rank(found)), str)
    assert result is not None
    return result
