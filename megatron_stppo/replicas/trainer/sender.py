"""The trainer's ranks send weights: to one replica, which passes them on, also while training goes on."""

import threading
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_stppo.model.learner import Learner
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.wire.messages import Receive
from megatron_stppo.replicas.wire.weights import Link, LinkLost
from megatron_stppo.weights.reshard.execute import Packed

ASKS = 2.0  # seconds after which a first rank that waits tells the others so


class Sender:
    """This rank's links to replicas, and the thread that sends a copy of the weights.

    Every rank calls the methods in the same order. The threads of all ranks run at the same time as training.
    They use a group of their own and the groups of the links, which have gloo only, and nothing that training
    changes: the copy is in host memory.
    """

    def __init__(self, learner: Learner, store: dist.Store, timeout: timedelta, hub: Hub | None) -> None:
        """store: on which the groups for weights are built. hub: on the first rank, None on the others."""
        self._learner, self._store, self._timeout, self._hub = learner, store, timeout, hub
        self._own = dist.new_group(backend="gloo", timeout=10 * timeout)
        self._links: dict[str, Link] = {}  # by route
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.sent = 0  # bytes

    def send(self, message: Receive, packed: Packed | None = None) -> None:
        """Send the weights that the message names to its replica, or have the hub lose the replica.

        packed: a copy of the weights; None: the policy's, which must be loaded.
        """
        route = message.route
        try:
            if (link := self._links.get(route.name)) is None:
                link = Link.from_trainer(self._learner, route, self._store, self._timeout, self._own)
                self._links[route.name] = link
            self.sent += link.sync(message.version, packed).bytes_moved
        except LinkLost as error:
            self._links.pop(route.name, None)
            if self._hub is not None:
                self._hub.lose(route.ends[0], str(error))

    def pack(self) -> tuple[Packed, int] | None:
        """Return a copy of what the next version sends, and to replicas of how many ranks it can be sent.

        None if no replica has got a version yet.
        """
        for link in self._links.values():
            if (packed := link.pack()) is not None:
                return packed, link.route.tensor
        return None

    def begin(self, packed: Packed, tensor: int) -> None:
        """Start to send a copy to the first replica that the hub names. Arguments as `pack` returns them."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(
            target=self._run, args=(packed, tensor, device), name="sender", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def stale(self, routes: Collection[str]) -> list[str]:
        """Return the routes of this rank's links that are not among these."""
        return [name for name in self._links if name not in routes]

    def close(self, routes: Collection[str] | None = None) -> None:
        """Close these links; None: all."""
        for name in list(self._links if routes is None else routes):
            if (link := self._links.pop(name, None)) is not None:
                link.close()

    def _run(self, packed: Packed, tensor: int, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread has the first one
            while True:
                message = self._hub.next_to_send(ASKS, tensor) if self._hub is not None else False
                message = decode(broadcast_bytes(encode(message), 0, self._own), bool | Receive)
                if isinstance(message, Receive):
                    self.send(message, packed)
                elif not message:
                    return
        except Exception as error:  # raised by `join`, in the main thread
            self._error = error
            if self._hub is not None:  # the main thread may be waiting
                self._hub.fail(error)
