"""Weights from the trainer's ranks to one replica, over a process group that joins the two programs.

Each replica has a group of its own, so if it dies only this group's collectives fail. The rows are planned,
sent and compared as between ranks of one program (reshard/); both sides compute the same plan.

A rank that fails must not leave other ranks waiting: they may be in a collective with it, or with a dead rank
whose end they do not notice (parallel/abandon.py). So the rank that fails first writes the reason to the
trainer's store, which all ranks read while they wait, and leaves the group; so does the trainer's first rank
if it detects in another way that a replica has died. On a replica, the rank that has the error raises it, and
the replica ends. The trainer's ranks agree over their default group, because the trainer continues without
the replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.printing import printable
from megatron_stppo.cluster.launch.rendezvous import address_towards, check_nccl_interface, connect_store
from megatron_stppo.model import build
from megatron_stppo.model.learner import Learner
from megatron_stppo.parallel import bridge
from megatron_stppo.parallel.abandon import GivenUp, call_unless
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.parallel.raise_together import raise_together
from megatron_stppo.replicas.wire.messages import Offer
from megatron_stppo.weights.reshard.merging import Term
from megatron_stppo.weights.reshard.resharder import Resharder, SyncReport
from megatron_stppo.weights.reshard.verify import ReshardError
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import ServedAdapters, served_adapters, transfer
from megatron_stppo.weights.sharding.spans import serving_layouts, training_layouts
from megatron_stppo.weights.sharding.tiles import Spans

if TYPE_CHECKING:  # it imports vLLM, which the trainer does not need
    from megatron_stppo.rollout.vllm.engine import Engine

Result = TypeVar("Result")
# Errors of this rank's own GPU, which are RuntimeErrors like those of a connection.
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class ReplicaLost(RuntimeError):
    """Weights could not be sent to a replica: it died, did not arrive in time, or its rows are wrong.

    All ranks of the trainer raise it together. The trainer's own groups and its other links still work.
    """


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
        tensors: Mapping[str, Tensor],
        shape: ModelShape,
        offer: Offer,
        tensor: int,
        timeout: timedelta,
        store: dist.Store | None = None,
        adapters: ServedAdapters | None = None,
        terms: Mapping[tuple[str, str], Term] | None = None,
    ) -> None:
        """Join the group and plan the copies. Use from_trainer or from_replica.

        tensors: those of this rank. tensor: ranks of the replica. timeout: see bridge.join. store: on the
        trainer; None on the replica. adapters: None if all weights are trained. terms: of the trainer's
        adapters, as for Resharder.
        """
        self.name, self._is_trainer = offer.group, store is not None
        self._store = connect_store(offer.host, offer.port, timeout) if store is None else store
        self._group: dist.ProcessGroup | None = None
        self._reshard: Resharder | None = None
        self._closed = ""  # why
        layouts = link_layouts(shape, offer, tensor)

        def connect() -> Resharder:
            address = address_towards(offer.host, offer.port)
            check_nccl_interface(address)
            group = bridge.join(
                # a connection of its own, because no other call gets through while this one waits
                self._store.clone(),  # type: ignore[attr-defined]  # missing in torch's stubs
                offer.group,
                first=0 if self._is_trainer else offer.layout.world,
                size=sum(map(len, layouts)),
                address=address,
                timeout=timeout,
            )
            self._group = group
            if self._closed:  # given up while the ranks were joining
                self._leave(self._closed)
                raise GivenUp(self._closed)
            rows = transfer(shape, *layouts, adapters)
            return Resharder(
                tensors if self._is_trainer else {},
                {} if self._is_trainer else tensors,
                *rows[:3],
                terms,
                changed=rows.changed,
                group=group,
                ranks_per_node=1,  # no rank of the trainer is nearer to the replica than another one
            )

        self._reshard = self._attempt(connect, "the link was not made")

    @classmethod
    def from_trainer(
        cls, learner: Learner, offer: Offer, tensor: int, store: dist.Store, timeout: timedelta
    ) -> Self:
        """Connect to a replica. Collective over the trainer's ranks and the replica's.

        The policy's weights must be loaded (learner.load_for("reshard")), here and in sync(). store:
        host_store() on the trainer's first rank, connect_store() on the others. Raises ReplicaLost on all
        ranks of the trainer.
        """
        weights = build.named_parameters(learner.policy)
        config, mesh, shape = learner.config, learner.mesh, learner.shape
        merged = config.model.lora.sync == "merged"
        terms = build.adapter_terms(weights, shape, config, mesh, merged=merged)
        adapters = served_adapters(config.model.lora, shape)
        return cls(weights, shape, offer, tensor, timeout, store, adapters, terms)

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

        From now on the engine generates only with weights that this link has received. Raises RuntimeError or
        OSError if the trainer is lost, and ReshardError if a rank's tensors do not match its layout.
        """
        ranks = dist.get_world_size()
        link = cls(engine.parameters(), shape, offer, ranks, timeout, adapters=adapters)
        engine.published = link.published
        return link

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
            self._raise(error)
        except (RuntimeError, OSError):
            self._leave(f"{what} on another rank")
            raise
        return result

    def _raise(self, error: Exception | None) -> None:
        """Raise this rank's error; on the trainer, a ReplicaLost on all ranks if one of them has an error."""
        if self._is_trainer:
            own = None if error is None else printable(f"{type(error).__name__}: {error}").partition("\n")[0]
            raise_together(own, self._lost, str)
        elif error is not None:
            raise error

    def _lost(self, found: Mapping[int, str]) -> ReplicaLost:
        """Return the exception for ranks that failed with these texts. The first of them stands for all."""
        rank, text = next(iter(found.items()))
        where = f"the replica of group {self.name}"
        return ReplicaLost(f"weights could not be sent to {where}: rank {rank}: {text}")

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


def tell_lost(store: dist.Store, group: str, why: str) -> None:
    """Make each rank of both programs raise an error if it is in a method of the link `group`, or enters one.

    Any thread may call it, with a connection to the store in which no other thread waits.
    """
    with contextlib.suppress(RuntimeError, OSError):  # the store ends with the trainer
        store.set(f"lost/{group}", why)


def why_lost(store: dist.Store, group: str) -> str:
    """Return the reason that tell_lost() was given for this group, or "". It does not wait."""
    key = f"lost/{group}"
    try:
        return store.get(key).decode(errors="replace") if store.check([key]) else ""
    except (RuntimeError, OSError) as error:
        return f"the trainer's store is gone: {error}"
