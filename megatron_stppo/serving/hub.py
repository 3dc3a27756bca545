"""The hub: the trainer's first rank's side of all replicas.

A thread takes the replicas' messages, also while the trainer's ranks score and update: it stores finished
episodes in the ledger, assigns waiting ones, and finds replicas that are lost. The main thread calls the
methods of Hub. A lost replica's episodes are assigned again, with the same seeds.

Outside this file a replica is named by its group, the process group for its weights, whose name is used once.
Its own name is used again by the replica that replaces it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_stppo.config import ConfigError
from megatron_stppo.messages import one_line, printable
from megatron_stppo.parallel.collectives import encode
from megatron_stppo.resilience.faults import EngineLost, ToolsStayAway
from megatron_stppo.serving.dispatch import parts, shares
from megatron_stppo.serving.ledger import Ledger
from megatron_stppo.serving.local import LocalReplicas
from megatron_stppo.serving.messages import (
    MOST_BYTES,
    Alive,
    Announce,
    Assignment,
    Counters,
    Done,
    FromReplica,
    Go,
    Hello,
    Leaving,
    NotAccepted,
    Offer,
    Play,
    Ready,
    ReplicaFailed,
    Stop,
)
from megatron_stppo.serving.trajectory_check import fault
from megatron_stppo.serving.transport import Listener, Unreadable
from megatron_stppo.telemetry.console import say
from megatron_stppo.types import Trajectory

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TICK = 0.2  # seconds between two looks for lost replicas
ABSENT = 10  # times serving.timeout: so long a run waits for a replica when it has none
log = logging.getLogger(__name__)


def _warn(text: str) -> None:
    """Write a line to the first rank's log and to the console. It may contain the output of a replica."""
    line = printable(text).replace("\n", " ")
    log.warning("%s", line)
    say(line)


@dataclass(frozen=True)
class Expected:
    """What a replica must have in common with the trainer, and the largest episode.

    Example: Expected("3f..", 151936, "bfloat16", "0.32.0", 32768).
    """

    model: str  # model_digest()
    vocabulary: int
    dtype: str
    vllm: str  # version
    max_context: int  # tokens
    experts: int = 0  # of a layer
    routes_per_token: int = 0  # layers * chosen experts if replicas record them, else 0
    tensor: frozenset[int] = frozenset({1})  # numbers of ranks over which vLLM can shard the model

    def refusal(self, hello: Hello) -> str:
        """Return why a replica is refused, or ""."""
        if not NAME.fullmatch(hello.name):
            return f"--name={hello.name[:80]!r}: give 1 to 64 letters, digits, '.', '_' or '-'"
        if hello.tensor not in self.tensor or hello.capacity < 1:
            return (
                f"rollout.engine_tensor={hello.tensor}, serving.concurrency={hello.capacity} of the replica "
                f"{hello.name}: no replica of this model has them; choose an engine_tensor of "
                f"{sorted(self.tensor)} and a concurrency of at least 1"
            )
        for name in ("model", "vocabulary", "dtype", "vllm"):
            mine, theirs = getattr(self, name), getattr(hello, name)
            if mine != theirs:
                return (
                    f"{name}={theirs} of the replica {hello.name} differs from the trainer's {mine}; start "
                    "it with the same model folder, model.dtype and packages"
                )
        return ""


@dataclass
class _Replica:
    group: str
    peer: bytes
    hello: Hello
    joined: bool = False
    playing: dict[int, Assignment] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # versions that it may have received
    ready: int = -1  # the version it can be updated to
    counters: Counters = field(default_factory=Counters)


class Hub:
    """See the module. All methods may be called from the main thread, one at a time."""

    def __init__(
        self,
        listener: Listener,
        ledger: Ledger,
        expected: Expected,
        timeout: float,
        local: LocalReplicas | None = None,
        journal: Mapping[int, str] | None = None,
        tell_lost: Callable[[str, str], None] = lambda group, why: None,
    ) -> None:
        """timeout: seconds of silence after which a replica is lost.

        local: the replicas that this machine starts. journal: {number of an episode: name of the replica that
        must play it}, to repeat a run. tell_lost: called with the group for weights of a lost replica, and
        the reason, so that no rank waits for it (losses.py).
        """
        self._listener, self._ledger, self._expected = listener, ledger, expected
        self._timeout, self._local, self._journal = timeout, local, journal
        self._tell_lost = tell_lost
        self._replicas: dict[str, _Replica] = {}  # by group
        self._groups = 0  # that were named
        self._waiting: deque[Assignment] = deque()
        self._results: dict[int, Trajectory] = {}  # of evaluations
        self._updating: set[str] = set()
        self._trouble: Exception | None = None
        self._alone_since = time.monotonic()
        self.lost, self.reassigned = 0, 0  # replicas; episodes of lost ones, which were assigned again
        self._gone = Counters()  # of lost replicas
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    # the main thread

    def admit(self, iteration: int) -> None:
        """Admit the episodes that may be played while this iteration collects its batch."""
        with self._changed:
            self._add(self._ledger.admit(iteration))

    def go_on_after_a_resume(self) -> None:
        """Assign the episodes that were admitted before a resume and have not finished."""
        with self._changed:
            self._add(self._ledger.unfinished())

    def state(self) -> dict[str, Any]:
        """Return the ledger's state."""
        with self._changed:
            return self._ledger.state()

    def kept(self) -> list[Done]:
        """Return the ledger's episodes for a checkpoint."""
        with self._changed:
            return self._ledger.kept()

    def bias(self) -> dict[str, float]:
        """Return the ledger's metrics of the order of batches."""
        with self._changed:
            return self._ledger.bias()

    def evaluate(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes of an evaluation, before all that wait. Their numbers are negative."""
        with self._changed:
            self._waiting.extendleft(reversed(list(episodes)))
            self._assign()

    def results(self, numbers: list[int]) -> list[Trajectory] | None:
        """Take the trajectories of an evaluation; None if they have not all finished."""
        if not all(number in self._results for number in numbers):
            return None
        return [self._results.pop(number) for number in numbers]

    def batch(self) -> list[Trajectory] | None:
        """Take the next batch; None if it is not complete."""
        return self._ledger.batch()

    def wait(self, result: Callable[[], T | None]) -> T | str:
        """Wait until result() is not None, and return it; or the group of a replica that can join.

        Raises ConfigError and ToolsStayAway if a replica reports them, EngineLost if there is no replica and
        none comes.
        """
        with self._changed:
            while True:
                if self._trouble is not None:
                    raise self._trouble
                if joining := next((r.group for r in self._by_name() if not r.joined), None):
                    return joining
                if (found := result()) is not None:
                    return found
                self._changed.wait()

    def taken(self) -> list[int]:
        """Return the groups of the last batch."""
        return self._ledger.taken

    def joined(self) -> int:
        """Return the number of replicas that serve."""
        with self._changed:
            return sum(replica.joined for replica in self._replicas.values())

    @property
    def gave_up(self) -> str:
        """Why a replica of this machine that ended is not started again; "" if none is needed."""
        return self._local.gave_up if self._local is not None else ""

    def groups(self) -> set[str]:
        """Return the groups of the replicas that are not lost."""
        with self._changed:
            return set(self._replicas)

    def tensor(self, group: str) -> int:
        """Return the number of ranks of the replica; 0 if it is lost."""
        with self._changed:
            replica = self._replicas.get(group)
            return replica.hello.tensor if replica is not None else 0

    def offer(self, offer: Offer) -> None:
        """Send the offer. The trainer's ranks build the group next."""
        with self._changed:
            if (replica := self._replicas.get(offer.group)) is not None:
                replica.held.add(offer.version)
                self._listener.send(replica.peer, offer)

    def joined_now(self, group: str) -> None:
        """Record that the replica has the offered version. It gets episodes."""
        with self._changed:
            if (replica := self._replicas.get(group)) is not None:
                replica.joined = True
                version = max(replica.held)
                say(
                    f"replica {replica.hello.name} has joined at version {version}; replicas: {self.joined()}"
                )
                self._assign()

    def announce(self, version: int) -> None:
        """Announce an update to all replicas that have joined. No evaluation may be in progress."""
        with self._changed:
            playing = [number for replica in self._replicas.values() for number in replica.playing]
            assert min(playing, default=0) >= 0, "an evaluation has one version"
            self._updating = {group for group, replica in self._replicas.items() if replica.joined}
            for group in self._updating:
                self._listener.send(self._replicas[group].peer, Announce(version))

    def next_update(self, version: int) -> str:
        """Wait until an announced replica is ready, tell it to enter the update, and return its group.

        Returns "" if none is left, or if the run must end: then the next `wait` raises the reason, where a
        checkpoint is written.
        """
        with self._changed:
            while True:
                self._updating &= set(self._replicas)
                if not self._updating or self._trouble is not None:
                    return ""
                able = [r for r in self._by_name() if r.group in self._updating and r.ready == version]
                if able:
                    self._updating.remove(able[0].group)
                    able[0].held.add(version)
                    self._listener.send(able[0].peer, Go(version))
                    return able[0].group
                self._changed.wait()

    def lose(self, group: str, why: str) -> None:
        """Remove a replica, and end it if it still runs. Its episodes are assigned again."""
        with self._changed:
            self._expel(group, why)

    def counters(self) -> Counters:
        """Return the sum of the newest counters of all replicas that serve or have served."""
        with self._changed:
            return sum((replica.counters for replica in self._replicas.values()), self._gone)

    def queues(self) -> dict[str, int]:
        """Return the numbers of episodes: waiting for a replica, played, finished and not trained."""
        with self._changed:
            playing = sum(len(replica.playing) for replica in self._replicas.values())
            return {
                "episodes_waiting": len(self._waiting),
                "episodes_playing": playing,
                "episodes_finished": self._ledger.ready,
            }

    def close(self, reason: str) -> None:
        """End all replicas, and the thread."""
        with self._changed:
            for replica in self._replicas.values():
                self._listener.send(replica.peer, Stop(reason))
            asked = {replica.hello.name for replica in self._replicas.values()}
            self._ended = True
        self._listener.wake()
        self._thread.join()
        self._listener.close()
        if self._local is not None:
            self._local.close(asked)

    # the hub's thread; all of this holds self._changed

    def _run(self) -> None:
        while not self._ended:
            try:
                messages = self._listener.take(TICK)
                with self._changed:
                    if self._ended:  # else replicas that have ended would be started again
                        return
                    for peer, message in messages:
                        self._take(peer, message)
                    self._look_for_lost()
                    self._changed.notify_all()
            except Exception as error:  # a bug must not leave the main thread waiting
                with self._changed:
                    self._trouble = error
                    self._changed.notify_all()
                if isinstance(error, ConfigError):  # of a replica; its message is complete
                    return
                raise

    def _take(self, peer: bytes, message: FromReplica | Unreadable) -> None:
        replica = next((r for r in self._replicas.values() if r.peer == peer), None)
        if isinstance(message, Hello) and replica is None:
            return self._greet(peer, message)
        if replica is None:
            return
        if isinstance(message, Unreadable | Hello):
            why = message.why if isinstance(message, Unreadable) else "a second Hello"
            self._expel(replica.group, f"it sent what a replica does not send: {why}")
        elif isinstance(message, Alive):
            replica.counters = message.counters or replica.counters
        elif isinstance(message, Ready):
            replica.ready = message.version
        elif isinstance(message, Done):
            self._done(replica, message)
        elif isinstance(message, Leaving):
            self._lose(replica.group, f"it was asked to end: {one_line(message.reason)}")
        elif isinstance(message, ReplicaFailed):
            self._failed(replica.group, message)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        why = self._expected.refusal(hello)
        if any(replica.hello.name == hello.name for replica in self._replicas.values()):
            why = f"--name={hello.name}: a replica of this name serves already; choose another"
        if why:
            _warn(f"a replica is refused: {one_line(why)}")
            self._listener.send(peer, NotAccepted(why))
            self._listener.expel(peer)
            return
        self._groups += 1
        group = f"weights-{self._groups}"
        self._replicas[group] = _Replica(group, peer, hello)

    def _done(self, replica: _Replica, done: Done) -> None:
        if done.number not in replica.playing:
            return self._expel(replica.group, f"it returned episode {done.number}, which it was not given")
        expected = self._expected
        why = fault(
            done,
            # an evaluation has one version: no replica is updated before it has ended
            held={max(replica.held)} if done.number < 0 else replica.held,
            vocabulary=expected.vocabulary,
            max_context=expected.max_context,
            experts=expected.experts,
            routes_per_token=expected.routes_per_token,
        )
        if why:
            return self._expel(replica.group, f"episode {done.number}: {why}")
        assigned = replica.playing.pop(done.number)
        # The task is ours: the replica might return another one.
        played = replace(done.trajectory, task=assigned.task, group=assigned.group)
        if done.number < 0:
            self._results[done.number] = played
        else:
            self._ledger.finish(done.number, played)
        self._assign()

    def _failed(self, group: str, failure: ReplicaFailed) -> None:
        text = one_line(failure.text)
        if failure.kind == "misuse":
            self._trouble = ConfigError(text)
        elif failure.kind == "away":
            self._trouble = ToolsStayAway(text)
        else:
            self._lose(group, text)

    def _expel(self, group: str, why: str) -> None:
        """Lose a replica that may not know it: one that is left running would never be replaced."""
        if (replica := self._replicas.get(group)) is not None:
            self._listener.expel(replica.peer)
            if self._local is not None:
                self._local.kill(replica.hello.name)
            self._lose(group, why)

    def _look_for_lost(self) -> None:
        for name, why in self._local.ended() if self._local is not None else ():
            for group in [r.group for r in self._replicas.values() if r.hello.name == name]:
                self._lose(group, why)
        for group, replica in list(self._replicas.items()):
            if (silent := self._listener.silence(replica.peer)) > self._timeout:
                limit = f"(serving.timeout={self._timeout:g})"
                why = f"no sign of life for {silent:.0f} s {limit}"
                self._expel(group, why if silent < math.inf else "its connection has ended")
        now = time.monotonic()
        if self._replicas:
            self._alone_since = now
            if isinstance(self._trouble, EngineLost):  # one came before anything had to wait for it
                self._trouble = None
        elif self._local is not None and self._local.gave_up:
            self._trouble = EngineLost(self._local.gave_up)
        elif now - self._alone_since > ABSENT * self._timeout:
            self._trouble = EngineLost(
                f"no replica has served for {now - self._alone_since:.0f} s; start one with "
                "`megatron-stppo serve RUN_DIR`"
            )

    def _lose(self, group: str, why: str) -> None:
        replica = self._replicas.pop(group)
        self.lost, self.reassigned = self.lost + 1, self.reassigned + len(replica.playing)
        self._gone += replica.counters
        again = f"{len(replica.playing)} episodes are played again"
        _warn(f"replica {replica.hello.name} is lost: {why}; {again}; replicas: {self.joined()}")
        self._tell_lost(group, why)
        self._waiting.extendleft(reversed(replica.playing.values()))
        self._assign()

    def _add(self, episodes: Iterable[Assignment]) -> None:
        self._waiting.extend(episodes)
        self._assign()

    def _assign(self) -> None:
        """Give waiting episodes to the replicas that have joined."""
        if self._journal is not None:
            return self._assign_as_recorded(self._journal)
        serving = [replica for replica in self._by_name() if replica.joined]
        playing = [len(replica.playing) for replica in serving]
        capacity = [replica.hello.capacity for replica in serving]
        for replica, share in zip(serving, shares(len(self._waiting), playing, capacity), strict=True):
            self._play(replica, [self._waiting.popleft() for _ in range(share)])

    def _assign_as_recorded(self, journal: Mapping[int, str]) -> None:
        """Give the waiting episodes to the replicas that played them in the recorded run."""
        for replica in self._by_name():
            if replica.joined:
                name = replica.hello.name
                own = [episode for episode in self._waiting if journal.get(episode.number) == name]
                self._waiting = deque(e for e in self._waiting if journal.get(e.number) != name)
                self._play(replica, own)

    def _by_name(self) -> list[_Replica]:
        return sorted(self._replicas.values(), key=lambda replica: replica.hello.name)

    def _play(self, replica: _Replica, episodes: list[Assignment]) -> None:
        replica.playing |= {episode.number: episode for episode in episodes}
        for part in parts(episodes, [len(encode(episode)) for episode in episodes], MOST_BYTES // 2):
            self._listener.send(replica.peer, Play(part))
