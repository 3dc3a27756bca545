"""What the messages of replicas change, and which replicas are lost.

Nothing here waits or takes a lock: the hub holds its own lock when it calls this.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from megatron_stppo.base.errors import EngineLost, ToolsStayAway
from megatron_stppo.base.printing import one_line, printable
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.trainer.crew import Crew, Member
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.ledger import Ledger
from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.messages import (
    Alive,
    Done,
    FromReplica,
    Hello,
    Leaving,
    NotAccepted,
    Ready,
    ReplicaFailed,
)
from megatron_stppo.replicas.wire.payloads import Unreadable

ABSENT = 10  # times serving.timeout: how long a run waits for a replica when it has none
log = logging.getLogger(__name__)


class Reception:
    """Applies messages to the crew and the ledger, and removes lost replicas.

    trouble: why the run must end, as soon as it waits for replicas; None if it need not.
    results: trajectories of evaluations, by number.
    """

    def __init__(
        self,
        listener: Listener,
        ledger: Ledger,
        crew: Crew,
        expected: Expected,
        timeout: float,
        local: LocalReplicas | None,
        tell_lost: Callable[[str, str], None],
        notice: Callable[[], str],
    ) -> None:
        """Arguments as of Hub."""
        self._listener, self._ledger, self._crew, self._expected = listener, ledger, crew, expected
        self._timeout, self._local, self._tell_lost, self._notice = timeout, local, tell_lost, notice
        self._alone_since = time.monotonic()
        self.trouble: Exception | None = None
        self.results: dict[int, Trajectory] = {}

    def take(self, peer: bytes, message: FromReplica | Unreadable) -> None:
        """Apply a message. Messages of unknown peers are ignored, except the first Hello."""
        member = self._crew.of_peer(peer)
        if isinstance(message, Hello) and member is None:
            return self._greet(peer, message)
        if member is None:
            return
        if isinstance(message, Unreadable | Hello):
            why = message.why if isinstance(message, Unreadable) else "a second Hello"
            self.expel(member.group, f"it sent what a replica does not send: {why}")
        elif isinstance(message, Alive):
            member.counters = message.counters or member.counters
        elif isinstance(message, Ready):
            member.ready = message.version
        elif isinstance(message, Done):
            self._done(member, message)
        elif isinstance(message, Leaving):
            self._lose(member.group, f"it was asked to end: {one_line(message.reason)}")
        elif isinstance(message, ReplicaFailed):
            self._failed(member.group, message)

    def expel(self, group: str, why: str) -> None:
        """Remove a replica, and end it if it still runs: otherwise it would never be replaced.

        Its episodes are assigned again. Nothing happens if it is lost already.
        """
        if (member := self._crew.members.get(group)) is not None:
            self._listener.expel(member.peer)
            if self._local is not None:
                self._local.kill(member.hello.name)
            self._lose(group, why)

    def look_for_lost(self) -> None:
        """Remove replicas that have ended or are silent. Raises ConfigError as LocalReplicas.ended does."""
        # the signal that is the reason for a notice may have ended them
        for name, why in self._local.ended(start_again=not self._notice()) if self._local else ():
            if (member := self._crew.named(name)) is not None:
                self._lose(member.group, why)
        for group, member in list(self._crew.members.items()):
            if (silent := self._listener.silence(member.peer)) > self._timeout:
                limit = f"(serving.timeout={self._timeout:g})"
                why = f"no sign of life for {silent:.0f} s {limit}"
                self.expel(group, why if silent < math.inf else "its connection has ended")
        now = time.monotonic()
        if self._crew.members:
            self._alone_since = now
            if isinstance(self.trouble, EngineLost):  # a replica came before the error was raised
                self.trouble = None
        elif self._local is not None and self._local.gave_up:
            self.trouble = EngineLost(self._local.gave_up)
        elif now - self._alone_since > ABSENT * self._timeout:
            self.trouble = EngineLost(
                f"no replica has served for {now - self._alone_since:.0f} s; start one with "
                "`megatron-stppo serve RUN_DIR`"
            )

    def _greet(self, peer: bytes, hello: Hello) -> None:
        why = self._expected.refusal(hello)
        if self._local is not None and not self._local.expects(hello.name, hello.process):
            why = f"--name={hello.name}: train starts a replica of this name itself; choose another"
        elif self._crew.named(hello.name) is not None:
            why = f"--name={hello.name}: a replica of this name serves already; choose another"
        if not why:
            self._crew.add(peer, hello)
            return
        _warn(f"a replica is refused: {why}")
        self._listener.send(peer, NotAccepted(why))
        self._listener.expel(peer)

    def _done(self, member: Member, done: Done) -> None:
        if done.number not in member.playing:
            return self.expel(member.group, f"it returned episode {done.number}, which it was not given")
        # an evaluation has one version: no replica is updated before it has ended
        held = {max(member.held)} if done.number < 0 else member.held
        if why := self._expected.fault(done, held):
            return self.expel(member.group, f"episode {done.number}: {why}")
        assigned = member.playing.pop(done.number)
        # The task is the trainer's own copy: a replica might return another one.
        played = replace(done.trajectory, task=assigned.task, group=assigned.group)
        if done.number < 0:
            self.results[done.number] = played
        else:
            self._ledger.finish(done.number, played)
        self._crew.assign()

    def _failed(self, group: str, failure: ReplicaFailed) -> None:
        text = one_line(failure.text)
        if failure.kind == "misuse":
            self.trouble = ConfigError(text)
        elif failure.kind == "away":
            self.trouble = ToolsStayAway(text)
        else:
            self._lose(group, text)

    def _lose(self, group: str, why: str) -> None:
        member = self._crew.remove(group)
        again = f"{len(member.playing)} episodes are played again"
        _warn(f"replica {member.hello.name} is lost: {why}; {again}; replicas: {self._crew.joined}")
        self._tell_lost(group, why)
        self._crew.assign()


def _warn(text: str) -> None:
    """Log one line, which may contain the output of a replica."""
    log.warning("%s", printable(text).replace("\n", " "))
