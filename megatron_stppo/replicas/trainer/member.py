"""One replica as the trainer knows it, and how many episodes each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_stppo.parallel.weight_tree import Node
from megatron_stppo.replicas.wire.channel import Channel
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import Assignment, FromTrainer, Hello, Play


@dataclass
class Member:
    """One replica. Example: Member("member-1", listener, peer, hello, Node(1)) has no weights yet."""

    group: str  # its name
    listener: Listener
    peer: Channel  # its connection
    hello: Hello
    node: Node
    playing: dict[int, Assignment] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # versions that it may have received
    counters: Counters = field(default_factory=Counters)
    recorded: int = 0  # the newest snapshot for which it has sent all records

    def send(self, message: FromTrainer) -> None:
        """Queue a message. A replica that is gone, or does not read, is found by its silence."""
        self.listener.send(self.peer, message)

    def play(self, episodes: Sequence[Assignment]) -> None:
        """Send the episodes in one message, or in several if they are too long for one. One that is too long
        with its record is sent without it."""
        try:
            self.send(Play(tuple(episodes)))
        except ValueError:
            if half := len(episodes) // 2:
                self.play(episodes[:half])
                self.play(episodes[half:])
            elif episodes[0].record:
                self.play([msgspec.structs.replace(episodes[0], record=())])
            else:
                raise


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
