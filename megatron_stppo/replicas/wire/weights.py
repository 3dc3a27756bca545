"""Weights from one program to another, over a process group that joins the two.

The sender is the trainer or a replica, the receiver a replica. Each pair has a group of its own, so if one
program dies only its own groups' collectives fail. The rows are planned, sent and compared as between ranks
of one program (reshard/); both sides compute the same plan.

What the trainer sends travels over gloo, from host memory to host memory: a thread sends it while training
uses NCCL, whose collectives must be enqueued in one order on all ranks, and the end of a replica must not
abort a communicator beside those of training. Replicas exchange tensors of a GPU over NCCL, between steps.

A rank that fails must not leave other ranks waiting: they may be in a collective with it, or with a dead rank
whose end they do not notice (parallel/abandon.py). So the rank that fails first writes the reason to the
trainer's store, which all ranks read while they wait, and leaves the group; so does the trainer's first rank
if it detects in another way that a replica has died. The ranks of a program agree over a group of their own,
because the program goes on without the other one.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.printing import printable
from megatron_stppo.cluster.launch.rendezvous import address_towards, check_nccl_interface
from megatron_stppo.model import build
from megatron_stppo.model.learner import Learner
from megatron_stppo.parallel import bridge
from megatron_stppo.parallel.abandon import GivenUp, call_unless
from megatron_stppo.parallel.collectives import gather_records, raise_together
from megatron_stppo.replicas.wire.messages import Route
from megatron_stppo.weights.reshard.resharder import Packed, Resharder, ReshardError, SyncReport
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import ServedAdapters, Term, served_adapters, transfer
from megatron_stppo.weights.sharding.spans import serving_layouts, training_layouts
from megatron_stppo.weights.sharding.tiles import Spans

Result = TypeVar("Result")
# Errors of this rank's own GPU, which are RuntimeErrors like those of a connection.
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class LinkLost(RuntimeError):
    """Weights were not sent: the other program died, did not arrive in time, or rows are wrong.

    All ranks of this program raise it together. Its own groups and its other links still work.
    """


class Link:
    """One rank's connection to another program, over which the policy's weights are sent.

    Both programs call the same methods in the same order, all ranks of both. After an exception the link is
    closed.

    Example: the trainer, and the replica that receives:
        link = Link.from_trainer(learner, route, store, timeout)
        link = Link(engine.parameters(), shape, route, True, store, timeout)
    and then both, for every version:
        report = link.sync(version)
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        shape: ModelShape,
        route: Route,
        receives: bool,
        store: dist.Store,
        timeout: timedelta,
        adapters: ServedAdapters | None = None,
        terms: Mapping[tuple[str, str], Term] | None = None,
        own: dist.ProcessGroup | None = None,
    ) -> None:
        """Join the group and plan the copies. Collective over the ranks of both programs. Raises LinkLost.

        tensors: those of this rank. receives: whether this program receives the weights. store: connected to
        the trainer's. timeout: see bridge.join. adapters: None if all weights are trained. terms: of the
        trainer's adapters, as for Resharder. own: the group over which the ranks of this program agree;
        default: the default group.
        """
        self.route, self._store, self._own = route, store, own
        self._told = (route.name, *route.ends)
        self._group: dist.ProcessGroup | None = None
        self._reshard: Resharder | None = None
        self._closed = ""  # why
        layouts, over_host = layouts_of(shape, route), not isinstance(route.source, int)

        def connect() -> Resharder:
            address = address_towards(route.host, route.port)
            check_nccl_interface(address)
            group = bridge.join(
                # a connection of its own, because no other call gets through while this one waits
                self._store.clone(),  # type: ignore[attr-defined]  # missing in torch's stubs
                route.name,
                first=route.senders if receives else 0,
                size=sum(map(len, layouts)),
                address=address,
                timeout=timeout,
                over_host=over_host,
            )
            self._group = group
            if self._closed:  # given up while the ranks were joining
                self._leave(self._closed)
                raise GivenUp(self._closed)
            rows = transfer(shape, *layouts, adapters, from_engine=isinstance(route.source, int))
            return Resharder(
                {} if receives else tensors,
                tensors if receives else {},
                *rows[:3],
                terms,
                changed=rows.changed,
                group=group,
                ranks_per_node=1,  # no rank of the sender is nearer to the receiver than another one
                over_host=over_host,
            )

        self._reshard = self._attempt(connect, "the link was not made")

    @classmethod
    def from_trainer(
        cls,
        learner: Learner,
        route: Route,
        store: dist.Store,
        timeout: timedelta,
        own: dist.ProcessGroup | None = None,
    ) -> Self:
        """Connect the trainer, which sends, to a replica. Collective over the ranks of both.

        The policy's weights must be loaded (learner.load_for("reshard")), here and in pack() and sync().
        store: host_store() on the trainer's first rank, connect_store() on the others. Raises LinkLost.
        """
        weights = build.named_parameters(learner.policy)
        config, mesh, shape = learner.config, learner.mesh, learner.shape
        merged = config.model.lora.sync == "merged"
        terms = build.adapter_terms(weights, shape, config, mesh, merged=merged)
        adapters = served_adapters(config.model.lora, shape)
        return cls(weights, shape, route, False, store, timeout, adapters, terms, own)

    def pack(self) -> Packed | None:
        """Copy what the next sync() of this link, or of one to a replica of as many ranks, sends.

        Not collective: the trainer calls it on all ranks. None if that sync sends everything, because none
        has succeeded yet, or if the link is closed. Raises errors of memory.
        """
        return self._reshard.pack() if self._reshard is not None else None

    def sync(self, version: int, packed: Packed | None = None) -> SyncReport:
        """Send the weights, which then have version `version` at the receiver. Collective.

        packed: on the sender, what pack() has copied; None: the present weights. Weights that no update
        changes are sent by the first call.

        Raises LinkLost on all ranks of a program if the other one is lost. If a checksum differs or the two
        sides do not name the same version, it fails on all ranks of both.
        """
        if self._reshard is None:
            raise RuntimeError(f"link {self.route.name} is closed ({self._closed}); make a new one")
        return self._attempt(lambda: self._send(version, packed), f"sync to version {version} failed")

    def _send(self, version: int, packed: Packed | None) -> SyncReport:
        reshard = self._reshard
        assert reshard is not None
        named = [of_rank[0] for of_rank in gather_records([version], int, self._group)]
        if len(set(named)) > 1:
            raise ReshardError(f"the ranks of link {self.route.name} sync to different versions: {named}")
        return reshard.sync(version, packed)

    def is_lost(self) -> bool:
        """Whether the replica at the other end, or this link, is known to be lost. Does not wait."""
        return bool(why_lost(self._store, self._told))

    def close(self) -> None:
        """Leave the group, without waiting for the other ranks. Other groups are not affected."""
        self._leave("closed by this side")

    def _attempt(self, step: Callable[[], Result], what: str) -> Result:
        """Return step(). If it fails on a rank of this program, leave the group and raise."""
        error: Exception | None = None
        try:
            result = call_unless(
                step, lambda: why_lost(self._store, self._told), lambda why: self._leave(f"{what}: {why}")
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
                tell_lost(self._store, self.route.name, f"{type(error).__name__}: {error}")
            self._leave(f"{what}: {error}")
        own = None if error is None else printable(f"{type(error).__name__}: {error}").partition("\n")[0]
        try:
            raise_together(own, self._lost, str, self._own)
        except (RuntimeError, OSError):
            self._leave(f"{what} on another rank")
            raise
        return result

    def _lost(self, failed: Mapping[int, str]) -> LinkLost:
        """Return the exception for ranks that failed with these texts. The first of them stands for all."""
        rank, text = next(iter(failed.items()))
        return LinkLost(f"weights were not sent over {self.route.name}: rank {rank}: {text}")

    def _leave(self, why: str) -> None:
        group, self._group, self._reshard = self._group, None, None
        self._closed = self._closed or why
        if group is not None:
            bridge.leave(group)


def layouts_of(shape: ModelShape, route: Route) -> tuple[dict[int, Spans], dict[int, Spans]]:
    """Return the layouts of the sender's and of the receiver's ranks, by group rank.

    Example: if a trainer of 2 ranks sends to a replica of tensor=2, the replica's ranks are 2 and 3.
    """
    first, source = route.senders, route.source
    if isinstance(source, int):
        sources = serving_layouts(shape, source, source)
    else:
        sources = training_layouts(shape, source.layout, spec=source.spec)
    receiver = serving_layouts(shape, route.tensor, route.tensor)
    return sources, {first + rank: spans for rank, spans in receiver.items()}


def tell_lost(store: dist.Store, name: str, why: str) -> None:
    """Make each rank raise an error that is in a method of a link of this name, or of a replica of this name,
    or enters one.

    Any thread may call it, with a connection to the store in which no other thread waits.
    """
    with contextlib.suppress(RuntimeError, OSError):  # the store ends with the trainer
        store.set(f"lost/{name}", why)


def why_lost(store: dist.Store, names: Collection[str]) -> str:
    """Return the reason that tell_lost() was given for the first of these names that has one, or "". It does
    not wait."""
    try:
        keys = [key for key in (f"lost/{name}" for name in names) if store.check([key])]
        return store.get(keys[0]).decode(errors="replace") if keys else ""
    except (RuntimeError, OSError) as error:
        return f"the trainer's store is gone: {error}"
