"""Weights from the trainer's ranks to one replica, over a process group that joins the two programs.

Each replica has a group of its own, so if it dies only this group's collectives fail. The rows are planned,
sent and compared as between ranks of one program (reshard/); both sides compute the same plan.

A rank that fails must not leave other ranks waiting: they may be in a collective with it, or with a dead rank
whose end they do not notice (parallel/abandon.py). So the rank that fails first writes the reason to the
store, which all ranks read while they wait, and leaves the group. Then the trainer's ranks agree on the
failure over their default group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.cluster.launch.rendezvous import address_towards, check_nccl_interface, connect_store
from megatron_stppo.model import build
from megatron_stppo.model.learner import Learner, served_terms
from megatron_stppo.parallel import bridge
from megatron_stppo.parallel.abandon import GivenUp, call_unless
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.replicas.wire.losses import raise_on_all, raise_own, tell_lost, why_lost
from megatron_stppo.replicas.wire.messages import Offer
from megatron_stppo.weights.reshard.engine_sync import EngineSync
from megatron_stppo.weights.reshard.merging import Term
from megatron_stppo.weights.reshard.resharder import SyncReport, nothing
from megatron_stppo.weights.reshard.verify import ReshardError
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.spans import serving_layouts, training_layouts
from megatron_stppo.weights.sharding.tiles import Spans
from megatron_stppo.weights.sharding.transfers import ServedAdapters, served_adapters, transfers

if TYPE_CHECKING:  # it imports vLLM, which the trainer does not need
    from megatron_stppo.rollout.vllm.engine import Engine

Result = TypeVar("Result")
# Errors of this rank's own GPU, which are RuntimeErrors like those of a connection.
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class Link:
    """One rank's connection to the other program, over which the policy's weights are sent.

    Both programs call the same methods in the same order, all ranks of both. The ranks of the trainer are
    0 .. offer.layout.world - 1 of the group and the replica's ranks follow. After an exception the link is
    closed.

    Example: the trainer, once per replica, and the replica:
        link = Link.from_trainer(learner, offer, tensor, store, timeout)
        link = Link.from_replica(engine, shape, offer, timeout)
    and then both, for every version:
        report = link.sync(version)
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        layouts: tuple[Mapping[int, Spans], Mapping[int, Spans]],
        shape: ModelShape,
        adapters: ServedAdapters | None,
        offer: Offer,
        store: dist.Store,
        timeout: timedelta,
        terms: Mapping[tuple[str, str], Term] | None = None,
        *,
        first: int,
        settle: Callable[[str, Exception | None], None],
        on_bucket: Callable[[int], None] = nothing,
    ) -> None:
        """Join the group and plan the copies. Use from_trainer or from_replica.

        source, target: this rank's tensors; one of them is empty. layouts: see link_layouts. adapters: None
        if all weights are trained. terms: of the sources' adapters, as for Resharder. first: group rank of
        this program's first rank. settle: called with the group's name and this rank's error after each
        step; raises if a rank of this program has an error.
        """
        self.name, self._store, self._settle = offer.group, store, settle
        self._group: dist.ProcessGroup | None = None
        self._reshard: EngineSync | None = None
        self._closed = ""  # why

        def connect() -> EngineSync:
            address = address_towards(offer.host, offer.port)
            check_nccl_interface(address)
            group = bridge.join(
                # a connection of its own, because no other call gets through while this one waits
                store.clone(),  # type: ignore[attr-defined]  # missing in torch's stubs
                offer.group,
                first=first,
                size=sum(map(len, layouts)),
                address=address,
                timeout=timeout,
            )
            self._group = group
            if self._closed:  # given up while the ranks were joining
                self._leave(self._closed)
                raise GivenUp(self._closed)
            return EngineSync(
                source,
                target,
                transfers(shape, *layouts, adapters),
                terms,
                group=group,
                ranks_per_node=1,  # no rank of the trainer is nearer to the replica than another one
                on_bucket=on_bucket,
            )

        self._reshard = self._attempt(connect, "the link was not made")

    @classmethod
    def from_trainer(
        cls, learner: Learner, offer: Offer, tensor: int, store: dist.Store, timeout: timedelta
    ) -> Self:
        """Connect to a replica. Collective over the trainer's ranks and the replica's.

        The policy's weights must be loaded (learner.load_for("reshard")), here and in sync().
        tensor: ranks of the replica. store: host_store() on the trainer's first rank, connect_store() on the
        others. timeout: see bridge.join.
        Raises ReplicaLost on all ranks of the trainer.
        """
        weights = build.named_parameters(learner.policy)
        config, mesh, shape = learner.config, learner.mesh, learner.shape
        terms = served_terms(weights, shape, config, mesh)
        adapters = served_adapters(config.model.lora, shape)
        return cls.of_tensors(weights, shape, offer, tensor, store, timeout, adapters, terms)

    @classmethod
    def of_tensors(
        cls,
        source: Mapping[str, Tensor],
        shape: ModelShape,
        offer: Offer,
        tensor: int,
        store: dist.Store,
        timeout: timedelta,
        adapters: ServedAdapters | None = None,
        terms: Mapping[tuple[str, str], Term] | None = None,
    ) -> Self:
        """Connect to a replica as from_trainer does, and send this rank's tensors of the trainer's layout."""
        layouts = link_layouts(shape, offer, tensor)
        return cls(
            source, {}, layouts, shape, adapters, offer, store, timeout, terms, first=0, settle=raise_on_all
        )

    @classmethod
    def from_replica(
        cls,
        engine: Engine,
        shape: ModelShape,
        offer: Offer,
        timeout: timedelta,
        adapters: ServedAdapters | None = None,
    ) -> Self:
        """Connect to the trainer. Collective over the trainer's ranks and the replica's.

        From now on the engine generates only with weights that this link has received. adapters: those of the
        run, None if all weights are trained.
        Raises RuntimeError or OSError if the trainer is lost, and ReshardError if a rank's tensors do not
        match its layout.
        """
        link = cls.into_tensors(engine.parameters(), shape, offer, timeout, adapters=adapters)
        engine.published = link.published
        return link

    @classmethod
    def into_tensors(
        cls,
        target: Mapping[str, Tensor],
        shape: ModelShape,
        offer: Offer,
        timeout: timedelta,
        on_bucket: Callable[[int], None] = nothing,
        adapters: ServedAdapters | None = None,
    ) -> Self:
        """Connect to the trainer as from_replica does, and write into this rank's tensors of the replica."""
        layouts, first = link_layouts(shape, offer, dist.get_world_size()), offer.layout.world
        store = connect_store(offer.host, offer.port, timeout)
        return cls(
            {},
            target,
            layouts,
            shape,
            adapters,
            offer,
            store,
            timeout,
            first=first,
            settle=raise_own,
            on_bucket=on_bucket,
        )

    def published(self) -> int:
        """Return the version of the replica's weights.

        Raises ReshardError unless the last sync succeeded on all ranks and the link is open.
        """
        if self._reshard is None:
            raise ReshardError(f"the link to the trainer is closed: {self._closed}")
        return self._reshard.published()

    def sync(self, version: int) -> SyncReport:
        """Send the policy's weights, which then have version `version` on the replica. Collective.

        Weights that no update changes are sent by the first call.

        Raises ReplicaLost on all ranks of the trainer if the replica is lost. On the replica, raises
        RuntimeError or OSError if the trainer is lost. If a checksum differs or the two sides do not name the
        same version, it fails on all ranks of both, with ReshardError on the replica.
        """
        if self._reshard is None:
            raise RuntimeError(f"link {self.name} is closed ({self._closed}); make a new one")
        return self._attempt(lambda: self._send(version), f"sync to version {version} failed")

    def _send(self, version: int) -> SyncReport:
        reshard = self._reshard
        assert reshard is not None
        named = [of_rank[0] for of_rank in gather_records([version], int, self._group)]
        if len(set(named)) > 1:
            raise ReshardError(f"the ranks of link {self.name} sync to different versions: {named}")
        return reshard.sync(version)

    def close(self) -> None:
        """Leave the group, without waiting for the other ranks. The default group is not affected."""
        self._leave("closed by this side")

    def _attempt(self, step: Callable[[], Result], what: str) -> Result:
        """Return step(). If it fails on a rank of this program, leave the group and raise."""
        error: Exception | None = None
        try:
            result = call_unless(
                step,
                lambda: why_lost(self._store, self.name),
                lambda why: self._leave(f"{what}: {why}"),
            )
        except OWN_ERRORS:
            raise
        except (RuntimeError, OSError) as caught:  # of a connection, GivenUp, or a ReshardError
            if isinstance(caught.__cause__, OWN_ERRORS):  # which the reshard reported to all ranks
                raise
            # without its traceback, whose frames refer to the group: see bridge.leave
            error = caught.with_traceback(None)
        if error is not None:
            if not isinstance(error, ReshardError | GivenUp):  # the others have one too
                tell_lost(self._store, self.name, f"{type(error).__name__}: {error}")
            self._leave(f"{what}: {error}")
        try:
            self._settle(self.name, error)
        except (RuntimeError, OSError):
            self._leave(f"{what} on another rank")
            raise
        return result

    def _leave(self, why: str) -> None:
        group, self._group, self._reshard = self._group, None, None
        self._closed = self._closed or why
        if group is not None:
            bridge.leave(group)


def link_layouts(shape: ModelShape, offer: Offer, tensor: int) -> tuple[dict[int, Spans], dict[int, Spans]]:
    """Return the layouts of the trainer's and of the replica's ranks, by group rank.

    Example: with 2 trainer ranks and a replica of tensor=2, the replica's ranks are 2 and 3.
    """
    first = offer.layout.world
    replica = serving_layouts(shape, tensor, tensor)
    return (
        training_layouts(shape, offer.layout, spec=offer.spec),
        {first + rank: spans for rank, spans in replica.items()},
    )
