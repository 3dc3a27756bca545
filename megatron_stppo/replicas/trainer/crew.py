"""The replicas that are connected, and which of them plays which episode.

Nothing here waits or takes a lock: the hub holds its own lock when it calls this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_stppo.parallel.collectives import encode
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.messages import MOST_BYTES, Assignment, Counters, Hello, Play

Item = TypeVar("Item")


@dataclass
class Member:
    """One replica, as the trainer sees it. Example: Member("weights-1", peer, hello) has not joined yet."""

    group: str  # its process group for weights
    peer: bytes  # its connection
    hello: Hello
    joined: bool = False
    playing: dict[int, Assignment] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # versions that it may have received
    ready: int = -1  # the version it can be updated to
    counters: Counters = field(default_factory=Counters)

    @property
    def newest(self) -> int:
        """The newest version that it may have received; -1 if none."""
        return max(self.held, default=-1)


class Crew:
    """The connected replicas and the episodes that wait for one; see the module.

    Example: after crew.add(peer, hello).joined = True and crew.append(episodes), the replica plays them.
    """

    def __init__(
        self, listener: Listener, journal: Mapping[int, str] | None, only_oldest: bool = False
    ) -> None:
        """journal: {number of an episode: name of the replica that must play it}, to repeat a run.

        only_oldest: only replicas with the oldest version that is served get episodes.
        """
        self._listener, self._journal, self._only_oldest = listener, journal, only_oldest
        self._added = 0
        self._waiting: deque[Assignment] = deque()
        self._gone = Counters()  # of lost replicas
        self.members: dict[str, Member] = {}  # by group
        self.lost, self.reassigned = 0, 0  # replicas; episodes of lost ones, which were assigned again

    def add(self, peer: bytes, hello: Hello) -> Member:
        """Add a replica, which gets episodes when it has joined."""
        self._added += 1
        member = Member(f"weights-{self._added}", peer, hello)
        self.members[member.group] = member
        return member

    def remove(self, group: str) -> Member:
        """Remove a replica. Its episodes are the first to be assigned next."""
        member = self.members.pop(group)
        self.lost, self.reassigned = self.lost + 1, self.reassigned + len(member.playing)
        self._gone += member.counters
        self._waiting.extendleft(reversed(member.playing.values()))
        return member

    def of_peer(self, peer: bytes) -> Member | None:
        return next((member for member in self.members.values() if member.peer == peer), None)

    def named(self, name: str) -> Member | None:
        return next((member for member in self.members.values() if member.hello.name == name), None)

    def by_name(self) -> list[Member]:
        return sorted(self.members.values(), key=lambda member: member.hello.name)

    @property
    def joined(self) -> int:
        """The number of replicas that serve."""
        return sum(member.joined for member in self.members.values())

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for a replica."""
        return len(self._waiting)

    def playing(self) -> list[int]:
        """Return the numbers of the episodes that replicas play."""
        return [number for member in self.members.values() for number in member.playing]

    def counters(self) -> Counters:
        """Return the sum of the newest counters of all replicas that serve or have served."""
        return sum((member.counters for member in self.members.values()), self._gone)

    def append(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes after all that wait."""
        self._waiting.extend(episodes)
        self.assign()

    def prepend(self, episodes: Iterable[Assignment]) -> None:
        """Assign episodes before all that wait."""
        self._waiting.extendleft(reversed(list(episodes)))
        self.assign()

    def assign(self) -> None:
        """Give waiting episodes to the replicas that have joined and have free places."""
        if self._journal is not None:
            return self._assign_as_recorded(self._journal)
        serving = [member for member in self.by_name() if member.joined]
        if self._only_oldest:
            oldest = min((member.newest for member in serving), default=-1)
            serving = [member for member in serving if member.newest == oldest]
        playing = [len(member.playing) for member in serving]
        capacity = [member.hello.capacity for member in serving]
        for member, share in zip(serving, shares(len(self._waiting), playing, capacity), strict=True):
            self._play(member, [self._waiting.popleft() for _ in range(share)])

    def _assign_as_recorded(self, journal: Mapping[int, str]) -> None:
        """Give the waiting episodes to the replicas that played them in the recorded run."""
        for member in self.by_name():
            if member.joined:
                name = member.hello.name
                own = [episode for episode in self._waiting if journal.get(episode.number) == name]
                self._waiting = deque(e for e in self._waiting if journal.get(e.number) != name)
                self._play(member, own)

    def _play(self, member: Member, episodes: list[Assignment]) -> None:
        member.playing |= {episode.number: episode for episode in episodes}
        for part in parts(episodes, [len(encode(episode)) for episode in episodes], MOST_BYTES // 2):
            self._listener.send(member.peer, Play(part))


def shares(waiting: int, playing: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """Return how many of the waiting episodes each replica gets.

    Each episode goes to the replica that then plays fewest, among those with a free place; of equal ones, to
    the last. playing, capacity: episodes per replica.
    Example: shares(5, [0, 2], [8, 8]) is [3, 2], and shares(9, [0, 0], [2, 4]) is [2, 4].
    """
    given = [0] * len(playing)
    for _ in range(waiting):
        free = [i for i, most in enumerate(capacity) if playing[i] + given[i] < most]
        if not free:
            break
        given[min(free, key=lambda i: (playing[i] + given[i], -i))] += 1
    return given


def parts(items: Sequence[Item], sizes: Sequence[int], limit: int) -> Iterator[tuple[Item, ...]]:
    """Yield the items in order, in tuples whose sizes sum to at most `limit`, or of one larger item.

    Example: list(parts("abc", [3, 2, 4], 5)) is [("a", "b"), ("c",)].
    """
    part: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if part and total + size > limit:
            yield tuple(part)
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield tuple(part)
