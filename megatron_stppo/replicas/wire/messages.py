"""Messages between the trainer's first rank and the first rank of a replica, and their payloads in msgpack.

replicas/__init__.py has their order. A replica plays at most `capacity` episodes at a time. After Announce it
plays on until Receive; with `drain` it starts no turn. Weights come from the trainer, or from a replica that
gets Give: both ends join the group of the Route, and replicas answer Moved. Both sides send signs of life.
"""

import hashlib
import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import msgspec

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Task
from megatron_stppo.config import Config
from megatron_stppo.data.routes import dtype_of
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.wire.episodes import Done, PackedDone, PackedRecord, Unfinished, packed
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.parts import LayerSpec

MOST_BYTES = 2**26  # of one message: the tasks that a replica gets at once, or an episode of 10^6 tokens;
# limit_of returns more if an episode can be larger


class _Sent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages. The class name is sent with the fields."""


class Assignment(msgspec.Struct, frozen=True):
    """One episode to play. Example: Assignment(70, task, 6, 1000003, 6, 1.0, 1.0)."""

    number: int  # >= 0: in order of admission; < 0: an episode of an evaluation. Unique in a run
    task: Task
    group: int  # Trajectory.group
    seed: int  # seed of the rollout; with `place` and the turn it gives the seed of a request
    place: int  # number of the episode within its rollout
    temperature: float
    top_p: float
    version: int = 0  # the oldest with which it may begin
    record: PackedRecord = ()  # what another replica has played of it


class Trained(msgspec.Struct, frozen=True):
    """How the trainer's ranks hold the weights."""

    layout: Layout
    spec: LayerSpec


class Route(msgspec.Struct, frozen=True):
    """The process group over which weights go from the trainer, or from one replica, to another replica.

    The sender's ranks come first in the group; the receiver's ranks follow.
    Example: Route("weights-2", "10.0.0.1", 4711, 8, 2, ("replica-1", "replica-2")) joins a replica of 8 ranks
    with one of 2.
    """

    name: str  # never used twice on the store
    host: str  # of the store
    port: int
    source: Trained | int  # of the trainer; or the ranks of a replica
    tensor: int  # ranks of the receiver
    ends: tuple[str, ...]  # the replicas at its ends, by the name under which their loss is told

    @property
    def senders(self) -> int:
        """The number of the sender's ranks."""
        return self.source if isinstance(self.source, int) else self.source.layout.world


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


def model_digest(path: Path) -> str:
    """Return 64 hexadecimal digits: a hash of the model's shape, its tokenizer and its end-of-text ids.

    The weights do not count: replicas get them from the trainer. Raises ConfigError if a file cannot be read.
    """
    parts = [asdict(read_shape(path)), digests(path)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def process_name(pid: int) -> str:
    """Return the name of a process of this machine. Example: "gpu07-4711"."""
    return f"{socket.gethostname()}-{pid}"


class Ready(_Sent, frozen=True):
    """The replica will receive `version` at the next step boundary after Receive."""

    version: int


class Moved(_Sent, frozen=True):
    """This end of a transfer has left it: all of the weights have arrived, or it has failed."""

    route: str
    version: int
    failed: str = ""  # why, in one line


class ToldUnfinished(_Sent, frozen=True):
    """All episodes in progress were sent, for the TellUnfinished of this number."""

    snapshot: int


class Alive(_Sent, frozen=True):
    """A sign of life. The trainer's is an empty payload (channel.py)."""

    counters: Counters


class ReplicaEnds(_Sent, frozen=True):
    """The replica ends.

    left: it was asked to. misuse: an error of the environment that ends the run. away: tools stay
    unreachable. error: another one.
    """

    kind: Literal["left", "misuse", "away", "error"]
    text: str  # one line


class Play(_Sent, frozen=True):
    """Episodes to play, in this order."""

    episodes: tuple[Assignment, ...]


class Announce(_Sent, frozen=True):
    """An update to `version` is due."""

    version: int


class _Transfer(_Sent, frozen=True):
    route: Route
    version: int


class Receive(_Transfer, frozen=True):
    """Receive the weights of `version` at the next step boundary."""


class Give(_Transfer, frozen=True):
    """Send the weights of `version`, which the replica has, at the next step boundary."""


class TellUnfinished(_Sent, frozen=True):
    """Send what the episodes in progress have played so far."""

    number: int


class Stop(_Sent, frozen=True):
    """The replica ends: the run has ended, or the trainer does not accept the replica."""

    reason: str  # one line; if the replica is refused, with field, value and remedy
    is_refusal: bool = False


FromReplica = Hello | Ready | Moved | Done | Unfinished | ToldUnfinished | Alive | ReplicaEnds
FromTrainer = Receive | Give | Play | Announce | TellUnfinished | Stop

# What a decoder can raise: wrong type or format; nested too deeply; not UTF-8; a key that is a list
_FAILURES = msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError
_from_replica = msgspec.msgpack.Decoder(
    Hello | Ready | Moved | PackedDone | Unfinished | ToldUnfinished | Alive | ReplicaEnds, strict=True
)
_from_trainer = msgspec.msgpack.Decoder(FromTrainer, strict=True)


def message_limit(max_context: int, routes_bytes: int = 0, histories: int = 1) -> int:
    """Return a bound of a message in bytes, for episodes with histories of max_context tokens.

    A token takes at most 4 bytes for its id, 8 for its log-prob and 12 for its own version. routes_bytes:
    of one token's recorded experts. The rest is for the text of the tasks that are sent together.
    Example: message_limit(32_768) is 5,242,880.
    """
    return histories * max_context * (32 + routes_bytes) + 4 * 2**20


def limit_of(config: Config, shape: ModelShape) -> int:
    """Return the size limit of a run's messages in bytes. Trainer and replicas compute the same one.

    An agent's episode has at most one history per turn, others have one.
    """
    e = config.environment
    histories = e.max_turns if e.kind == "agent" else 1
    routes = shape.layers * shape.experts_per_token * dtype_of(shape.experts).itemsize
    of_token = routes if config.replays_rollout else 0
    return max(MOST_BYTES, message_limit(config.max_context, of_token, histories))


def pack(message: FromReplica | FromTrainer, max_bytes: int) -> bytes:
    """Return the payload of a message. Raises ValueError if it exceeds max_bytes, the receiver's limit."""
    payload = msgspec.msgpack.encode(packed(message) if isinstance(message, Done) else message)
    if len(payload) > max_bytes:
        name = type(message).__name__
        raise ValueError(f"a message {name} of {len(payload)} bytes exceeds the limit of {max_bytes}")
    return payload


def unpack_from_replica(payload: bytes) -> FromReplica:
    """Return the message of a replica. Raises ValueError with one printable line, whatever the payload is:
    the replica may run another version, or be hostile."""
    try:
        message = _from_replica.decode(payload)
        return message.unpack() if isinstance(message, PackedDone) else message
    except _FAILURES as error:
        raise ValueError(one_line(str(error))) from None


def unpack_from_trainer(payload: bytes) -> FromTrainer:
    """Return the message of the trainer. Raises msgspec.MsgspecError if it runs another version."""
    return _from_trainer.decode(payload)
