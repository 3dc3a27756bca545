"""The hub: the trainer's first rank's side of all replicas.

A thread takes the replicas' messages, also while the trainer's ranks score and update: the crew stores
finished episodes in the ledger, finds replicas that are lost, and assigns their episodes again with the same
seeds. The main thread calls the methods of Hub. One lock guards everything that both threads use.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_stppo.base.errors import Abandoned, EngineLost
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.local import GRACE, LEAVING
from megatron_stppo.replicas.wire.episodes import Done, Unfinished, versions_of
from megatron_stppo.replicas.wire.messages import Assignment, Receive, Stop, TellUnfinished

T = TypeVar("T")
TICK = 0.2  # seconds between two checks for lost replicas


class Hub:
    """All replicas, for the main thread of the trainer's first rank, which calls one method at a time.

    A replica is named by its group, as in crew.py.
    """

    def __init__(self, crew: Crew, notice: Callable[[], str] = lambda: "") -> None:
        """notice: returns why the run must end soon, for example the name of a signal, or ""."""
        self._crew, self._notice, self.ledger = crew, notice, crew.ledger
        self.sends_apart = False  # whether a thread of the trainer sends weights
        self._changed = threading.Condition()
        self._snapshots = 0  # so far
        self._told = ""  # why the run must end soon, if only another rank knows
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def admit(self, iteration: int) -> None:
        """Admit the episodes that may be played while this iteration collects its batch.

        They begin with the version that was announced last, or a later one.
        """
        with self._changed:
            self._crew.add(self.ledger.admit(iteration))

    def ask(self, question: Callable[[Crew], T]) -> T:
        """Return question(the crew), while no message changes it. Example: hub.ask(Crew.counters)."""
        with self._changed:
            return question(self._crew)

    def kept(self) -> tuple[list[Done], list[Unfinished]]:
        """Return the ledger's episodes for a checkpoint, and the records of those in progress."""
        with self._changed:
            return self.ledger.kept(), [Unfinished(*record) for record in self._crew.records.items()]

    def record(self, patience: float) -> None:
        """Ask the replicas what their episodes have played so far. Wait for the answers, at most `patience`
        seconds: a record that is missing, or older, costs work only."""
        ends = time.monotonic() + patience
        with self._changed:
            self._snapshots += 1
            asked = [member for member in self._crew.members.values() if member.node.has_joined]
            for member in asked:
                member.send(TellUnfinished(self._snapshots))
            while time.monotonic() < ends and any(
                member.recorded < self._snapshots and member.group in self._crew.members for member in asked
            ):
                self._changed.wait(TICK)

    def recall(self, unfinished: Iterable[Unfinished]) -> None:
        """Continue the episodes of a checkpoint that are open, and whose tokens are not too old."""
        with self._changed:
            self._crew.records = {
                episode.number: episode.record
                for episode in unfinished
                if self.ledger.continues(episode.number, versions_of(episode.record))
            }

    def evaluate(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes of an evaluation, before all that wait. Their numbers are negative."""
        with self._changed:
            self._crew.add(episodes, first=True)

    def must_end(self, why: str) -> None:
        """Note that the run must end soon."""
        with self._changed:
            self._told = why

    def wait(
        self,
        result: Callable[[], T | None],
        patience: float = math.inf,
        version: int = -1,
        abandons: bool = False,
    ) -> T | Receive | None:
        """Wait until result() is not None, and return it; or what the trainer must send.

        Return None after `patience` seconds without any replica that serves. version: of the trainer's
        present weights. abandons: return None with replicas too, and raise Abandoned if the run must end.
        Raises ConfigError and ToolsStayAway if a replica reports them. Raises EngineLost if there is no
        replica and none comes, or if the run must end soon and no replica serves: a signal to all programs of
        a run ends its replicas at once, so that the iteration cannot be completed.
        """
        asks = time.monotonic() + patience
        with self._changed:
            while True:
                if self._crew.trouble is not None:
                    raise self._crew.trouble
                if (message := self._to_send(version)) is not None:
                    return message
                if (answer := result()) is not None:
                    return answer
                why = self._why_end()
                if why and abandons:
                    raise Abandoned(why)
                if why and not self._crew.joined:
                    raise EngineLost(f"{why}, and no replica serves any more")
                if (abandons or not self._crew.joined) and time.monotonic() > asks:
                    return None
                self._changed.wait()  # the thread notifies every TICK

    # What `wait` waits for, while it holds the lock. None: not yet.

    def results(self, numbers: list[int]) -> list[Trajectory] | None:
        """Take the trajectories of an evaluation."""
        results = self._crew.results
        if not results.keys() >= set(numbers):
            return None
        return [results.pop(number) for number in numbers]

    def batch(self) -> list[Trajectory] | None:
        """Take the next batch. Groups without variance are dropped, and others are admitted and assigned."""
        while more := self.ledger.resample():
            self._crew.add(more)
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
            self._crew.add(self.ledger.unfinished())
            return True
        local = self._crew.local
        if why := (local.gave_up if local is not None else "") or self._why_end():
            raise EngineLost(f"before {wanted} replicas served: {why}")
        return None

    # The sending of weights.

    def fail(self, error: Exception) -> None:
        """Have the next `wait` raise an error of the thread that sends."""
        with self._changed:
            self._crew.trouble, self.sends_apart = error, False
            self._changed.notify_all()

    def announce(self, version: int, apart: bool = False) -> None:
        """Begin to send a version to all replicas, and announce it to those that have joined.

        apart: the trainer sends in a thread that calls `next_to_send`. No evaluation may be in progress.
        """
        with self._changed:
            assert min(self._crew.playing(), default=0) >= 0, "an evaluation has one version"
            self.sends_apart = apart
            self._crew.begin(version)

    def next_to_send(self, patience: float, tensor: int) -> Receive | bool:
        """Wait for a replica of `tensor` ranks to which the trainer has sent before, and return what it must
        send.

        A thread of the trainer calls it. Return True after `patience` seconds, and False if the thread must
        end: no such replica is left, or it keeps others waiting, or one has the version. Replicas without a
        link to the trainer get the weights by `wait`.
        """
        ends = time.monotonic() + patience
        with self._changed:
            tree = self._crew.tree
            while not tree.stopped and self._crew.trouble is None:
                if hop := tree.first(tensor):
                    return self._crew.receive(hop)
                if not tree.can_be_first(tensor):
                    break
                if time.monotonic() > ends:
                    return True
                self._changed.wait(TICK)
            self.sends_apart = False
            return False

    def is_spread(self) -> bool | None:
        """Return True if all that have joined have the version, or no replica can pass it on."""
        return self._crew.tree.is_over or None

    def serves(self, version: int) -> bool | None:
        """Return True if a replica has the version, or none has joined."""
        nodes = self._crew.tree.nodes.values()
        return not any(n.has_joined for n in nodes) or any(n.version == version for n in nodes) or None

    def end_transfers(self) -> None:
        """Begin no transfer of weights any more, and wait for those in progress, in which a replica that ends
        is lost to the other end. If the run was asked to end, wait for at most LEAVING seconds."""
        ends = time.monotonic() + LEAVING
        with self._changed:
            self._crew.tree.stopped = True
            while self._crew.tree.is_moving and self._thread.is_alive():
                if self._why_end() and time.monotonic() > ends:
                    return
                self._changed.wait(TICK)

    def close(self, reason: str) -> None:
        """End all replicas, and the thread."""
        crew = self._crew
        with self._changed:
            crew.tree.stopped = True
            for member in crew.members.values():
                member.send(Stop(reason))
            asked = {member.hello.name for member in crew.members.values()}
            self._ended = True
        crew.listener.wake()
        self._thread.join()
        crew.listener.close()
        if crew.local is not None:
            crew.local.close(asked, LEAVING if self._why_end() else GRACE)

    def _to_send(self, version: int) -> Receive | None:
        """Return what the trainer must send. If no replica has the version before, it is `version`."""
        tree = self._crew.tree
        if self.sends_apart:
            return None
        if -1 < tree.version < version and tree.is_stuck and tree.nodes:
            self._crew.begin(version)
        hop = tree.first()
        return None if hop is None else self._crew.receive(hop)

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
                    self._crew.pass_on()
                    self._changed.notify_all()
            except Exception as error:  # a bug must not leave the main thread waiting
                with self._changed:
                    self._crew.trouble = error
                    self._changed.notify_all()
                if isinstance(error, ConfigError):  # of a replica; its message is complete
                    return
                raise
