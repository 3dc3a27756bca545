"""What replicas play: which episodes each of them gets, and what those in progress have played so far."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_stppo.parallel.weight_tree import Node
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.wire.channel import Channel
from megatron_stppo.replicas.wire.episodes import PackedRecord, Unfinished
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.messages import Assignment, Counters, Hello, Play


@dataclass
class Member:
    """One replica. Example: Member("replica-1", peer, hello, Node(1)) has no weights yet."""

    group: str  # its name
    peer: Channel  # its connection
    hello: Hello
    node: Node
    playing: dict[int, Assignment] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # versions that it may have received
    counters: Counters = field(default_factory=Counters)
    recorded: int = 0  # the newest snapshot for which it has sent all records


def send_episodes(listener: Listener, peer: Channel, episodes: Sequence[Assignment]) -> None:
    """Send the episodes in one message, or in several if they are too long for one. One that is too long with
    its record is sent without it."""
    try:
        listener.send(peer, Play(tuple(episodes)))
    except ValueError:
        if (half := len(episodes) // 2) == 0:
            if not episodes[0].record:
                raise
            return send_episodes(listener, peer, [msgspec.structs.replace(episodes[0], record=())])
        send_episodes(listener, peer, episodes[:half])
        send_episodes(listener, peer, episodes[half:])


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


class EpisodeRecords:
    """What each episode in progress has played, as replicas have told, by its number: for checkpoints, and to
    continue it on another replica."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._records: dict[int, PackedRecord] = {}

    def __iter__(self) -> Iterator[Unfinished]:
        return (Unfinished(number, record) for number, record in self._records.items())

    def keep(self, told: Unfinished, held: Collection[int]) -> str:
        """Keep a record. Return why it is not possible, or "".

        held: the versions that the replica has got.
        """
        known = {*held, *self.versions(told.number)}
        if why := self._expected.record_fault(told.record, known):
            return why
        self._records[told.number] = told.record
        return ""

    def of(self, number: int) -> PackedRecord:
        """Return the record of an episode; () if it has none."""
        return self._records.get(number, ())

    def versions(self, number: int) -> set[int]:
        """Return the versions in the record of an episode, which its next replica may name."""
        return versions_of(self.of(number))

    def drop(self, number: int) -> None:
        """Forget an episode that has ended."""
        self._records.pop(number, None)

    def recall(self, unfinished: Collection[Unfinished]) -> None:
        """Begin with the records of a checkpoint."""
        self._records = {one.number: one.record for one in unfinished}


def versions_of(record: PackedRecord) -> set[int]:
    """Return the versions of a record's tokens."""
    return {version for _, turns in record for _, _, versions, *_ in turns for version, _ in versions}
