"""Which replica gets weights next: those that join, and those that are updated."""

from __future__ import annotations

import threading

from megatron_stppo.observe.console import say
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.reception import Reception
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.messages import Announce, Go, Offer


class Updates:
    """The messages around the sending of weights, for the main thread of the trainer's first rank.

    A replica is named by its group, as in hub.py. changed: the hub's lock, which its thread notifies.
    """

    def __init__(
        self, changed: threading.Condition, listener: Listener, crew: Crew, reception: Reception
    ) -> None:
        self._changed, self._listener, self._crew, self._reception = changed, listener, crew, reception
        self._updating: set[str] = set()

    def groups(self) -> set[str]:
        """Return the groups of the replicas that are not lost."""
        with self._changed:
            return set(self._crew.members)

    def tensor(self, group: str) -> int:
        """Return the number of ranks of the replica; 0 if it is lost."""
        with self._changed:
            member = self._crew.members.get(group)
            return member.hello.tensor if member is not None else 0

    def offer(self, offer: Offer) -> None:
        """Send the offer. The trainer's ranks build the group next."""
        with self._changed:
            if (member := self._crew.members.get(offer.group)) is not None:
                member.held.add(offer.version)
                self._listener.send(member.peer, offer)

    def joined_now(self, group: str) -> None:
        """Record that the replica has the offered version. It gets episodes."""
        with self._changed:
            if (member := self._crew.members.get(group)) is not None:
                member.joined = True
                name, version = member.hello.name, member.newest
                say(f"replica {name} has joined at version {version}; replicas: {self._crew.joined}")
                self._crew.assign()

    def announce(self, version: int) -> None:
        """Announce an update to the replicas that have joined with another version.

        No evaluation may be in progress.
        """
        with self._changed:
            assert min(self._crew.playing(), default=0) >= 0, "an evaluation has one version"
            others = [m for m in self._crew.members.values() if m.joined and version not in m.held]
            self._updating = {member.group for member in others}
            for member in others:
                self._listener.send(member.peer, Announce(version))

    def next_update(self, version: int) -> str:
        """Wait until an announced replica is ready, send it Go, and return its group.

        Returns "" if none is left, or if the run must end: then the next `wait` raises the reason, where a
        checkpoint is written.
        """
        with self._changed:
            while True:
                self._updating &= set(self._crew.members)
                if not self._updating or self._reception.trouble is not None:
                    return ""
                able = (m for m in self._crew.by_name() if m.group in self._updating and m.ready == version)
                if (member := next(able, None)) is not None:
                    self._updating.remove(member.group)
                    member.held.add(version)
                    self._listener.send(member.peer, Go(version))
                    return member.group
                self._changed.wait()

    def lose(self, group: str, why: str) -> None:
        """Remove a replica, and end it if it still runs. Its episodes are assigned again."""
        with self._changed:
            self._reception.expel(group, why)
