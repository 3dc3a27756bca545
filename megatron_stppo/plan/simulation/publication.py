"""Sending a new version of the weights to all replicas, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron_stppo.plan.simulation.clock import Clock
from megatron_stppo.plan.simulation.replica import ReplicaModel


class Publication:
    """Announces a version to all replicas, and sends it to one at a time, in the order in which they are
    ready. A replica generates until it is its turn."""

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[ReplicaModel],
        version: int,
        transfer: float,
        published: Callable[[], None],
    ) -> None:
        """transfer: seconds per replica. published: called when all replicas have the version."""
        self._clock, self._version, self._transfer, self._published = clock, version, transfer, published
        self._left = len(replicas)
        self._ready: list[ReplicaModel] = []
        self._sending = False
        for replica in replicas:
            replica.announce(partial(self._is_ready, replica))

    def _is_ready(self, replica: ReplicaModel) -> None:
        self._ready.append(replica)
        self._send()

    def _send(self) -> None:
        if self._ready and not self._sending:
            self._sending = True
            replica = self._ready.pop(0)
            replica.pause(partial(self._paused, replica))

    def _paused(self, replica: ReplicaModel) -> None:
        self._clock.at(self._clock.now + self._transfer, partial(self._sent, replica))

    def _sent(self, replica: ReplicaModel) -> None:
        replica.go_on(self._version)
        self._sending, self._left = False, self._left - 1
        if self._left:
            self._send()
        else:
            self._published()
