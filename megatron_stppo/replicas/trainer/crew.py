"""The replicas: what their messages change, which of them are lost, and which plays which episode.

Nothing here waits or takes a lock: the hub holds its own lock when it calls this.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from megatron_stppo.base.errors import EngineLost, ToolsStayAway
from megatron_stppo.base.printing import one_line, printable
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.observe.console import say
from megatron_stppo.parallel.weight_tree import Hop, Node, WeightTree
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.wire import messages
from megatron_stppo.replicas.wire.channel import Channel
from megatron_stppo.replicas.wire.ends import Listener
from megatron_stppo.replicas.wire.episodes import Done, PackedRecord, Unfinished, versions_of
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import Assignment, Receive, Route, Trained

ABSENT = 10  # times serving.timeout: how long a run waits for a replica when it has none
log = logging.getLogger(__name__)


@dataclass
class Member:
    """One replica. Example: Member("member-1", listener, peer, hello, Node(1)) has no weights yet."""

    group: str  # its name
    listener: Listener
    peer: Channel  # its connection
    hello: messages.Hello
    node: Node
    playing: dict[int, Assignment] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # versions that it may have received
    counters: Counters = field(default_factory=Counters)
    recorded: int = 0  # the newest snapshot for which it has sent all records

    def send(self, message: messages.FromTrainer) -> None:
        """Queue a message. A replica that is gone, or does not read, is found by its silence."""
        self.listener.send(self.peer, message)

    def play(self, episodes: Sequence[Assignment]) -> None:
        """Send the episodes in one message, or in several if they are too long for one. One that is too long
        with its record is sent without it."""
        try:
            self.send(messages.Play(tuple(episodes)))
        except ValueError:
            if half := len(episodes) // 2:
                self.play(episodes[:half])
                self.play(episodes[half:])
            elif episodes[0].record:
                self.play([msgspec.structs.replace(episodes[0], record=())])
            else:
                raise


@dataclass
class Crew:
    """The connected replicas and the episodes that wait for one.

    A replica is named by its group, a name that is used once. Its own name is used again by the replica that
    replaces it.

    tell_lost: called with the group of a lost replica and the reason, so that no rank waits for it
    (wire/weights.py); in a thread of its own, for which no replica waits.
    """

    listener: Listener
    ledger: EpisodeLedger
    expected: Expected
    address: tuple[str, int]  # host and port of the store on which the groups for weights are built
    trained: Trained  # how the trainer holds the weights
    timeout: float  # seconds of silence after which a replica is lost
    local: LocalReplicas | None = None  # the replicas that this machine starts
    tell_lost: Callable[[str, str], object] = lambda group, why: None
    members: dict[str, Member] = field(default_factory=dict, init=False)  # by group
    tree: WeightTree = field(default_factory=WeightTree, init=False)
    # What each episode in progress has played, as replicas have told, by its number
    records: dict[int, PackedRecord] = field(default_factory=dict, init=False)
    results: dict[int, Trajectory] = field(default_factory=dict, init=False)  # of evaluations, by number
    lost: int = field(default=0, init=False)  # replicas
    reassigned: int = field(default=0, init=False)  # episodes of lost replicas, which were assigned again
    trouble: Exception | None = field(default=None, init=False)  # why the run must end when it waits
    _waiting: deque[Assignment] = field(default_factory=deque, init=False)
    _gone: Counters = field(default_factory=Counters, init=False)  # of lost replicas
    _added: int = field(default=0, init=False)
    _alone_since: float = field(default_factory=time.monotonic, init=False)

    @property
    def joined(self) -> int:
        """The number of replicas that serve."""
        return sum(member.node.has_joined for member in self.members.values())

    def playing(self) -> list[int]:
        """Return the numbers of the episodes that replicas play."""
        return [number for member in self.members.values() for number in member.playing]

    def counters(self) -> Counters:
        """Return the sum of the newest counters of all replicas that serve or have served."""
        return sum((member.counters for member in self.members.values()), self._gone)

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the replicas, of the episodes that are not trained on, and of their order."""
        return {
            "replicas": self.joined,
            "lost": self.lost,
            "reassigned": self.reassigned,
            "episodes_waiting": len(self._waiting),
            "episodes_playing": len(self.playing()),
            "episodes_finished": self.ledger.ready,
            **self.ledger.bias(),
            "update_seconds": self.tree.seconds,
        }

    def add(self, episodes: Iterable[Assignment], first: bool = False) -> None:
        """Assign episodes after all that wait, or before them. They begin with the newest version."""
        new = [msgspec.structs.replace(episode, version=self.tree.version) for episode in episodes]
        if first:
            self._waiting.extendleft(reversed(new))
        else:
            self._waiting.extend(new)
        self.assign()

    def assign(self) -> None:
        """Give waiting episodes to the replicas that have joined and have free places."""
        joined = (member for member in self.members.values() if member.node.has_joined)
        serving = sorted(joined, key=lambda member: member.hello.name)
        playing = [len(member.playing) for member in serving]
        capacity = [member.hello.capacity for member in serving]
        for member, share in zip(serving, shares(len(self._waiting), playing, capacity), strict=True):
            episodes = [self._waiting.popleft() for _ in range(share)]
            member.playing |= {episode.number: episode for episode in episodes}
            if episodes:
                member.play([self._with_record(episode) for episode in episodes])

    def take(self, peer: Channel, message: messages.FromReplica) -> None:
        """Apply a message. Messages of unknown peers are ignored, except the first Hello."""
        member = next((member for member in self.members.values() if member.peer == peer), None)
        if member is None:
            return self._greet(peer, message) if isinstance(message, messages.Hello) else None
        match message:
            case messages.Hello():
                self.expel(member.group, "it sent a second Hello")
            case messages.Alive():
                member.counters = message.counters
            case messages.Ready():
                member.node.ready = message.version
                self.pass_on()
            case messages.Moved():
                self._moved(member, message)
            case Done():
                self._done(member, message)
            case Unfinished():
                self._record(member, message)
            case messages.ToldUnfinished():
                member.recorded = message.snapshot
            case messages.ReplicaEnds(kind="misuse"):
                self.trouble = ConfigError(one_line(message.text))
            case messages.ReplicaEnds(kind="away"):
                self.trouble = ToolsStayAway(one_line(message.text))
            case messages.ReplicaEnds():
                asked = "it was asked to end: " if message.kind == "left" else ""
                self._lose(member, asked + one_line(message.text))

    def expel(self, group: str, why: str) -> None:
        """Remove a replica, and end it if it still runs: otherwise it would never be replaced.

        Its episodes are assigned again. Nothing happens if it is lost already.
        """
        if (member := self.members.get(group)) is not None:
            self.listener.expel(member.peer)
            if self.local is not None:
                self.local.kill(member.hello.name)
            self._lose(member, why)

    def look_for_lost(self, must_end: bool) -> None:
        """Remove replicas that have ended or are silent. Raises ConfigError as LocalReplicas.ended does.

        must_end: the run ends soon, perhaps by a signal that has ended the replicas too: none is restarted.
        """
        for name, why in self.local.ended(start_again=not must_end) if self.local else ():
            if (member := self._named(name)) is not None:
                self._lose(member, why)
        for group, member in list(self.members.items()):
            if (silent := member.peer.silence) > self.timeout:
                why = f"no sign of life for {silent:.0f} s (serving.timeout={self.timeout:g})"
                self.expel(group, why if silent < math.inf else "its connection has ended")
        alone = time.monotonic() - self._alone_since
        if self.members:
            self._alone_since = time.monotonic()
            if isinstance(self.trouble, EngineLost):  # a replica came before the error was raised
                self.trouble = None
        elif self.local is not None and self.local.gave_up:
            self.trouble = EngineLost(self.local.gave_up)
        elif alone > ABSENT * self.timeout:
            self.trouble = EngineLost(
                f"no replica has served for {alone:.0f} s; start one with `megatron-stppo serve RUN_DIR`"
            )

    def _named(self, name: str) -> Member | None:
        return next((member for member in self.members.values() if member.hello.name == name), None)

    def _greet(self, peer: Channel, hello: messages.Hello) -> None:
        why = self.expected.refusal(hello)
        if self.local is not None and not self.local.expects(hello.name, hello.process):
            why = f"--name={hello.name}: train starts a replica of this name itself; choose another"
        elif self._named(hello.name) is not None:
            why = f"--name={hello.name}: a replica of this name serves already; choose another"
        if why:
            _warn(f"a replica is refused: {why}")
            self.listener.send(peer, messages.Stop(why, is_refusal=True))
            return self.listener.expel(peer)
        self._added += 1
        group = f"member-{self._added}"
        node = self.tree.nodes[group] = Node(hello.tensor)
        self.members[group] = Member(group, self.listener, peer, hello, node)
        self.pass_on()

    def begin(self, version: int) -> None:
        """Begin to send a version to all replicas, and announce it to those that have joined."""
        for group in self.tree.begin(version):
            self.members[group].send(messages.Announce(version))

    def pass_on(self) -> None:
        """Begin the transfers between replicas that can begin now."""
        for hop in self.tree.hops():
            self.members[hop.source].send(messages.Give(self._route(hop), hop.version))
            self.receive(hop)

    def receive(self, hop: Hop) -> Receive:
        """Tell the receiver of a transfer, and return the message."""
        target, message = self.members[hop.target], Receive(self._route(hop), hop.version)
        target.held.add(hop.version)
        target.send(message)
        return message

    def _route(self, hop: Hop) -> Route:
        source = self.members.get(hop.source)
        ends = tuple(group for group in (hop.source, hop.target) if group)
        held = self.trained if source is None else source.hello.tensor
        return Route(hop.route, *self.address, held, self.members[hop.target].hello.tensor, ends)

    def _moved(self, member: Member, moved: messages.Moved) -> None:
        node, had_joined = member.node, member.node.has_joined
        for group in self.tree.ended(moved.route, member.group, bool(moved.failed)):
            self.expel(group, f"too many transfers of weights have failed: {one_line(moved.failed)}")
        if moved.failed:
            _warn(f"replica {member.hello.name}: {one_line(moved.failed)}; weights are sent again")
        elif node.has_joined and not had_joined:
            joined = f"replica {member.hello.name} has joined at version {node.version}"
            say(f"{joined}; replicas: {self.joined}")
            self.assign()
        if not moved.failed and -1 < node.version < self.tree.version:  # begun meanwhile
            member.send(messages.Announce(self.tree.version))
        self.pass_on()

    def _done(self, member: Member, done: Done) -> None:
        """Store an episode that has ended: in the ledger, or for the evaluation that waits for it."""
        number, played = done.number, done.trajectory
        if number not in member.playing:
            return self.expel(member.group, f"it returned episode {number}, which it was not given")
        # an evaluation has one version: no replica is updated before it has ended
        held = {max(member.held)} if number < 0 else self._known(member, number)
        if why := self.expected.fault(played, held):
            return self.expel(member.group, f"episode {number}: {why}")
        assigned = member.playing.pop(number)
        if number < 0:
            # The task is the trainer's own copy: a replica might return another one.
            self.results[number] = replace(played, task=assigned.task, group=assigned.group)
        else:
            self.ledger.finish(number, played)
            self.records.pop(number, None)
        self.assign()

    def _record(self, member: Member, told: Unfinished) -> None:
        if told.number not in member.playing or told.number < 0:
            return self.expel(member.group, f"it recorded episode {told.number}, which it was not given")
        if why := self.expected.record_fault(told.record, self._known(member, told.number)):
            return self.expel(member.group, f"record of episode {told.number}: {why}")
        self.records[told.number] = told.record

    def _known(self, member: Member, number: int) -> set[int]:
        """Return the versions that a replica may name for an episode, which another one may have begun."""
        return member.held | versions_of(self.records.get(number, ()))

    def _lose(self, member: Member, why: str) -> None:
        """Remove a replica. Its episodes are the first to be assigned next."""
        del self.members[member.group]
        self.tree.lost(member.group)
        self.lost, self.reassigned = self.lost + 1, self.reassigned + len(member.playing)
        self._gone += member.counters
        again = f"{len(member.playing)} episodes are played again"
        _warn(f"replica {member.hello.name} is lost: {why}; {again}; replicas: {self.joined}")
        threading.Thread(target=self.tell_lost, args=(member.group, why), name="loss", daemon=True).start()
        self._waiting.extendleft(reversed(member.playing.values()))
        self.assign()

    def _with_record(self, episode: Assignment) -> Assignment:
        """Return the episode with what was played of it. No older version may continue it."""
        record = self.records.get(episode.number, ())
        version = max({episode.version} | versions_of(record))
        return msgspec.structs.replace(episode, record=record, version=version)


def _warn(text: str) -> None:
    """Log one line, which may contain the output of a replica."""
    log.warning("%s", printable(text).replace("\n", " "))


def shares(waiting: int, playing: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """Return how many of the waiting episodes each replica gets.

    Each episode goes to the replica that then plays fewest, among those with a free place; of equal ones, to
    the last. playing, capacity: episodes per replica.
    Example: shares(5, [0, 2], [8, 8]) is [3, 2], and shares(9, [0, 0], [2, 4]) is [2, 4].
    """
    counts = [0] * len(playing)
    for _ in range(waiting):
        free = [i for i, most in enumerate(capacity) if playing[i] + counts[i] < most]
        if not free:
            break
        counts[min(free, key=lambda i: (playing[i] + counts[i], -i))] += 1
    return counts
