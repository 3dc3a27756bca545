"""The hub: the trainer's first rank's side of all replicas.

A thread takes the replicas' messages, also while the trainer's ranks score and update: the crew stores
finished episodes in the ledger, finds replicas that are lost, and assigns their episodes again with the same
seeds. The main thread calls the methods of Hub. One lock guards everything that both threads use.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from megatron_stppo.base.errors import EngineLost
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.observe.console import say
from megatron_stppo.replicas.trainer.crew import Crew, Member
from megatron_stppo.replicas.wire.messages import Announce, Assignment, Counters, Done, Go, Offer, Stop

T = TypeVar("T")
TICK = 0.2  # seconds between two checks for lost replicas


class Hub:
    """All replicas, for the main thread of the trainer's first rank, which calls one method at a time.

    A replica is named by its group, as in crew.py.
    """

    def __init__(self, crew: Crew, notice: Callable[[], str] = lambda: "") -> None:
        """notice: returns why the run must end soon, for example the name of a signal, or ""."""
        self._crew, self._notice, self.ledger = crew, notice, crew.ledger
        self._updating: set[str] = set()  # groups that were announced an update and have not got it
        self._changed = threading.Condition()
        self._told = ""  # why the run must end soon, if only another rank knows
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def admit(self, iteration: int) -> None:
        """Admit the episodes that may be played while this iteration collects its batch."""
        with self._changed:
            self._crew.append(self.ledger.admit(iteration))

    def state(self) -> dict[str, Any]:
        """Return the ledger's state."""
        with self._changed:
            return self.ledger.state()

    def kept(self) -> list[Done]:
        """Return the ledger's episodes for a checkpoint."""
        with self._changed:
            return self.ledger.kept()

    def put_back(self) -> None:
        """Undo the last batch for a checkpoint. The run must end."""
        with self._changed:
            self.ledger.put_back()

    def evaluate(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes of an evaluation, before all that wait. Their numbers are negative."""
        with self._changed:
            self._crew.prepend(episodes)

    def must_end(self, why: str) -> None:
        """Note that the run must end soon."""
        with self._changed:
            self._told = why

    def wait(self, result: Callable[[], T | None], patience: float = math.inf) -> T | Member | None:
        """Wait until result() is not None, and return it; or a replica that can join.

        Return None after `patience` seconds without any replica that serves.
        Raises ConfigError and ToolsStayAway if a replica reports them. Raises EngineLost if there is no
        replica and none comes, or if the run must end soon and no replica serves: a signal to all programs of
        a run ends its replicas at once, so that the iteration cannot be completed.
        """
        asks = time.monotonic() + patience
        with self._changed:
            while True:
                if self._crew.trouble is not None:
                    raise self._crew.trouble
                if joining := next((m for m in self._crew.by_name() if not m.joined), None):
                    return joining
                if (found := result()) is not None:
                    return found
                if (why := self._why_end()) and not self._crew.joined:
                    raise EngineLost(f"{why}, and no replica serves any more")
                if not self._crew.joined and time.monotonic() > asks:
                    return None
                self._changed.wait()  # the thread notifies every TICK

    # What `wait` waits for, while it holds the lock. None: not yet.

    def results(self, numbers: list[int]) -> list[Trajectory] | None:
        """Take the trajectories of an evaluation."""
        found = self._crew.results
        if not all(number in found for number in numbers):
            return None
        return [found.pop(number) for number in numbers]

    def batch(self) -> list[Trajectory] | None:
        """Take the next batch. Groups without variance are dropped, and others are admitted and assigned."""
        while more := self.ledger.resample():
            self._crew.append(more)
        return self.ledger.batch()

    def settled(self) -> bool | None:
        """Return True if all admitted episodes have finished."""
        return self.ledger.settled or None

    def all_serve(self, wanted: int, show: Callable[[int, int], object]) -> bool | None:
        """Assign the episodes that a checkpoint left open, and return True, if `wanted` replicas serve.

        show: called with the number that serves, and `wanted`. Raises EngineLost if fewer will serve.
        """
        show(self._crew.joined, wanted)
        if self._crew.joined >= wanted:
            self._crew.append(self.ledger.unfinished())
            return True
        local = self._crew.local
        if why := (local.gave_up if local is not None else "") or self._why_end():
            raise EngineLost(f"before {wanted} replicas served: {why}")
        return None

    # The messages around the sending of weights.

    def groups(self) -> set[str]:
        """Return the groups of the replicas that are not lost."""
        with self._changed:
            return set(self._crew.members)

    def offer(self, offer: Offer) -> None:
        """Send the offer. The trainer's ranks build the group next."""
        with self._changed:
            if (member := self._crew.members.get(offer.group)) is not None:
                member.held.add(offer.version)
                self._crew.listener.send(member.peer, offer)

    def joined_now(self, group: str) -> None:
        """Record that the replica has the offered version. It gets episodes."""
        with self._changed:
            if (member := self._crew.members.get(group)) is not None:
                member.joined = True
                name, version = member.hello.name, max(member.held)
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
                self._crew.listener.send(member.peer, Announce(version))

    def next_update(self, version: int) -> str:
        """Wait until an announced replica is ready, send it Go, and return its group.

        Returns "" if none is left, or if the run must end: then the next `wait` raises the reason, where a
        checkpoint is written.
        """
        with self._changed:
            while True:
                self._updating &= set(self._crew.members)
                if not self._updating or self._crew.trouble is not None:
                    return ""
                able = (m for m in self._crew.by_name() if m.group in self._updating and m.ready == version)
                if (member := next(able, None)) is not None:
                    self._updating.remove(member.group)
                    member.held.add(version)
                    self._crew.listener.send(member.peer, Go(version))
                    return member.group
                self._changed.wait()

    def lose(self, group: str, why: str) -> None:
        """Remove a replica, and end it if it still runs. Its episodes are assigned again."""
        with self._changed:
            self._crew.expel(group, why)

    def counters(self) -> Counters:
        """Return the sum of the newest counters of all replicas that serve or have served."""
        with self._changed:
            return self._crew.counters()

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the replicas, of the episodes that are not trained on, and of their order."""
        with self._changed:
            return self._crew.numbers() | self.ledger.bias()

    def close(self, reason: str) -> None:
        """End all replicas, and the thread."""
        crew = self._crew
        with self._changed:
            for member in crew.members.values():
                crew.listener.send(member.peer, Stop(reason))
            asked = {member.hello.name for member in crew.members.values()}
            self._ended = True
        crew.listener.wake()
        self._thread.join()
        crew.listener.close()
        if crew.local is not None:
            crew.local.close(asked)

    def _why_end(self) -> str:
        return self._told or self._notice()

    def _run(self) -> None:
        """Take messages until `close`. Runs in the hub's thread."""
        while not self._ended:
            try:
                messages = self._crew.listener.take(TICK)
                with self._changed:
                    if self._ended:  # else replicas that have ended would be started again
                        return
                    for peer, message in messages:
                        self._crew.take(peer, message)
                    self._crew.look_for_lost(must_end=bool(self._why_end()))
                    self._changed.notify_all()
            except Exception as error:  # a bug must not leave the main thread waiting
                with self._changed:
                    self._crew.trouble = error
                    self._changed.notify_all()
                if isinstance(error, ConfigError):  # of a replica; its message is complete
                    return
                raise
