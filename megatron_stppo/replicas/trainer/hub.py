"""The hub: the trainer's first rank's side of all replicas.

A thread takes the replicas' messages, also while the trainer's ranks score and update: it stores finished
episodes in the ledger, finds replicas that are lost (reception.py), and assigns waiting episodes (crew.py). A
lost replica's episodes are assigned again, with the same seeds. The main thread calls the methods of Hub, and
those of Updates when weights are sent. One lock guards everything that both threads use.

A replica is named by its group, the process group for its weights, whose name is used once.
Its own name is used again by the replica that replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from megatron_stppo.base.errors import EngineLost
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.ledger import Ledger
from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.trainer.reception import Reception
from megatron_stppo.replicas.trainer.updates import Updates
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.losses import LossNotices
from megatron_stppo.replicas.wire.messages import Assignment, Counters, Done, Stop

T = TypeVar("T")
TICK = 0.2  # seconds between two checks for lost replicas


class Hub:
    """All replicas, for the trainer's first rank; see the module.

    All methods may be called from the main thread, one at a time.
    """

    def __init__(
        self,
        listener: Listener,
        ledger: Ledger,
        expected: Expected,
        timeout: float,
        local: LocalReplicas | None = None,
        journal: Mapping[int, str] | None = None,
        tell_lost: Callable[[str, str], None] = lambda group, why: None,
        notice: Callable[[], str] = lambda: "",
        completes: bool = False,
    ) -> None:
        """timeout: seconds of silence after which a replica is lost.

        local: the replicas that this machine starts. journal: {number of an episode: name of the replica that
        must play it}, to repeat a run. tell_lost: called with the group for weights of a lost replica, and
        the reason, so that no rank waits for it (losses.py), in a thread for which no replica waits. notice:
        returns why the run must end soon, for example the name of a signal, or "". completes: admitted
        episodes are completed before an update. A replica that joins meanwhile with the new version gets
        none of them while one with the old version serves.
        """
        self._listener, self._ledger, self._local = listener, ledger, local
        self._crew, self._notice = Crew(listener, journal, completes), notice
        self._losses = LossNotices(tell_lost)
        self._reception = Reception(
            listener, ledger, self._crew, expected, timeout, local, self._losses.add, notice
        )
        self._changed = threading.Condition()
        self.updates = Updates(self._changed, listener, self._crew, self._reception)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def admit(self, iteration: int) -> None:
        """Admit the episodes that may be played while this iteration collects its batch."""
        with self._changed:
            self._crew.append(self._ledger.admit(iteration))

    def go_on_after_a_resume(self) -> None:
        """Assign the episodes that were admitted before a resume and have not finished."""
        with self._changed:
            self._crew.append(self._ledger.unfinished())

    def state(self) -> dict[str, Any]:
        """Return the ledger's state."""
        with self._changed:
            return self._ledger.state()

    def kept(self) -> list[Done]:
        """Return the ledger's episodes for a checkpoint."""
        with self._changed:
            return self._ledger.kept()

    def evaluate(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes of an evaluation, before all that wait. Their numbers are negative."""
        with self._changed:
            self._crew.prepend(episodes)

    def results(self, numbers: list[int]) -> list[Trajectory] | None:
        """Take the trajectories of an evaluation; None if they have not all finished."""
        found = self._reception.results
        if not all(number in found for number in numbers):
            return None
        return [found.pop(number) for number in numbers]

    def batch(self) -> list[Trajectory] | None:
        """Take the next batch; None if it is not complete. For `wait`, which holds the lock.

        Groups without variance are dropped, and the episodes that are admitted in their place are assigned.
        """
        while more := self._ledger.resample():
            self._crew.append(more)
        return self._ledger.batch()

    def settled(self) -> bool | None:
        """Return True if all admitted episodes have finished, else None. For `wait`, which holds the lock."""
        return self._ledger.settled or None

    def wait(self, result: Callable[[], T | None]) -> T | str:
        """Wait until result() is not None, and return it; or the group of a replica that can join.

        Raises ConfigError and ToolsStayAway if a replica reports them. Raises EngineLost if there is no
        replica and none comes, or if the run must end soon and no replica serves: a signal to all programs of
        a run ends its replicas at once, so that the iteration cannot be completed.
        """
        with self._changed:
            while True:
                if self._reception.trouble is not None:
                    raise self._reception.trouble
                if joining := next((m.group for m in self._crew.by_name() if not m.joined), None):
                    return joining
                if (found := result()) is not None:
                    return found
                if (why := self._notice()) and not self._crew.joined:
                    raise EngineLost(f"{why}, and no replica serves any more")
                self._changed.wait()  # the thread notifies every TICK

    def joined(self) -> int:
        """Return the number of replicas that serve."""
        with self._changed:
            return self._crew.joined

    @property
    def lost(self) -> int:
        """The number of replicas that were lost."""
        return self._crew.lost

    @property
    def gave_up(self) -> str:
        """Why a replica of this machine that ended is not started again; "" if none is needed."""
        return self._local.gave_up if self._local is not None else ""

    @property
    def notice(self) -> str:
        """Why the run must end soon; "" if it need not."""
        return self._notice()

    def counters(self) -> Counters:
        """Return the sum of the newest counters of all replicas that serve or have served."""
        with self._changed:
            return self._crew.counters()

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the replicas, of the episodes that are not trained on, and of their order."""
        with self._changed:
            return {
                "replicas": self._crew.joined,
                "lost": self._crew.lost,
                "reassigned": self._crew.reassigned,
                "episodes_waiting": self._crew.waiting,
                "episodes_playing": len(self._crew.playing()),
                "episodes_finished": self._ledger.ready,
                **self._ledger.bias(),
            }

    def close(self, reason: str) -> None:
        """End all replicas, and the thread."""
        with self._changed:
            for member in self._crew.members.values():
                self._listener.send(member.peer, Stop(reason))
            asked = {member.hello.name for member in self._crew.members.values()}
            self._ended = True
        self._listener.wake()
        self._thread.join()
        self._losses.close()
        self._listener.close()
        if self._local is not None:
            self._local.close(asked)

    def _run(self) -> None:
        """Take messages until `close`. Runs in the hub's thread."""
        reception = self._reception
        while not self._ended:
            try:
                messages = self._listener.take(TICK)
                with self._changed:
                    if self._ended:  # else replicas that have ended would be started again
                        return
                    for peer, message in messages:
                        reception.take(peer, message)
                    reception.look_for_lost()
                    self._changed.notify_all()
            except Exception as error:  # a bug must not leave the main thread waiting
                with self._changed:
                    reception.trouble = error
                    self._changed.notify_all()
                if isinstance(error, ConfigError):  # of a replica; its message is complete
                    return
                raise
