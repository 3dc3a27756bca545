"""The messages between the trainer's first rank and the first rank of a replica.

A replica joins:    Hello -> Offer, or Stop. After an Offer both sides build the process group over
                    which weights are sent, and send the offered version.
It plays episodes:  Play -> Done, one per episode. The trainer never assigns more than `capacity` at a time.
It is updated:      Announce -> Ready -> Go, then both sides send the weights. Between Ready and Go the
                    replica continues to play; with `drain` it starts no new turn.
It leaves:          Stop from the trainer; ReplicaEnds from the replica.
Both sides send signs of life regularly. A side that is silent for serving.timeout is lost.
"""

from __future__ import annotations

import operator
import socket
from typing import Literal

import msgspec
from msgspec.structs import astuple

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.mlp_spans import LayerSpec


class _Sent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages. The class name is sent with the fields."""


def process_name(pid: int) -> str:
    """Return the name of a process of this machine. Example: "gpu07-4711"."""
    return f"{socket.gethostname()}-{pid}"


class Assignment(msgspec.Struct, frozen=True):
    """One episode to play. Example: Assignment(70, task, 6, 1000003, 6, 1.0, 1.0)."""

    number: int  # >= 0: in order of admission; < 0: an episode of an evaluation. Unique in a run
    task: Task
    group: int  # Trajectory.group
    seed: int  # seed of the rollout; with `place` and the turn it gives the seed of a request
    place: int  # number of the episode within its rollout
    temperature: float
    top_p: float


class Counters(msgspec.Struct):
    """What a replica has done since it joined. Seconds are wall time.

    Example: Counters(seconds=10.0, idle_seconds=2.5) has waited for a quarter of the time.
    """

    seconds: float = 0.0  # since it joined, up to the newest of the following numbers
    steps: int = 0  # engine steps
    step_seconds: float = 0.0  # in engine steps
    idle_seconds: float = 0.0  # waiting for messages and for answers of environments, without engine steps
    updates: int = 0  # weight updates after the first, whose pause has ended
    pause_seconds: float = 0.0  # between the last step before and the first step after an update
    longest_pause: float = 0.0  # seconds
    recomputed: int = 0  # tokens whose key-value cache was computed again because of updates
    tokens: int = 0  # generated, in complete turns
    episodes: int = 0  # ended

    def __add__(self, other: Counters) -> Counters:
        """Return the sums, but the longer one of the longest pauses."""
        total = Counters(*map(operator.add, astuple(self), astuple(other)))
        total.longest_pause = max(self.longest_pause, other.longest_pause)
        return total


class Hello(_Sent, frozen=True):
    """The first message of a replica."""

    name: str  # unique among the replicas of a run
    model: str  # model_digest() of its model folder
    vocabulary: int
    dtype: str
    vllm: str  # version
    tensor: int  # ranks
    capacity: int  # episodes in progress
    process: str  # process_name() of its first rank


class Ready(_Sent, frozen=True):
    """The replica will enter the update to `version` at the next step boundary after Go."""

    version: int


class Done(_Sent, frozen=True):
    """An episode has ended."""

    number: int
    trajectory: Trajectory


class Alive(_Sent, frozen=True):
    """A sign of life. The trainer's is an empty payload (channel.py)."""

    counters: Counters


class ReplicaEnds(_Sent, frozen=True):
    """The replica ends.

    left: it was asked to (SIGTERM, or the end of its Slurm job). misuse: an error of the environment that
    ends the run. away: tools stay unreachable. error: another one.
    """

    kind: Literal["left", "misuse", "away", "error"]
    text: str  # one line


class Offer(_Sent, frozen=True):
    """The process group for weights, which the replica joins now, and the version that is sent first.

    The trainer's ranks are 0 to layout.world - 1 of the group; the replica's ranks follow.
    """

    group: str  # a name that is never used twice on the store
    host: str  # of the store
    port: int
    layout: Layout  # of the trainer
    spec: LayerSpec
    version: int


class Play(_Sent, frozen=True):
    """Episodes to play, in this order."""

    episodes: tuple[Assignment, ...]


class Announce(_Sent, frozen=True):
    """An update to `version` is due."""

    version: int


class Go(_Sent, frozen=True):
    """Enter the update at the next step boundary: the trainer's ranks are in it."""

    version: int


class Stop(_Sent, frozen=True):
    """The replica ends: the run has ended, or the trainer does not accept the replica."""

    reason: str  # one line; if the replica is refused, with field, value and remedy
    is_refusal: bool = False


FromReplica = Hello | Ready | Done | Alive | ReplicaEnds
FromTrainer = Offer | Play | Announce | Go | Stop
