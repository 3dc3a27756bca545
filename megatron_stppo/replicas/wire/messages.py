"""Messages between the trainer's first rank and the first rank of a replica, and their payloads in msgpack.

A replica joins:    Hello -> Offer, or Stop. After an Offer both sides build the process group over
                    which weights are sent, and send the offered version.
It plays episodes:  Play -> Done, one per episode. The trainer never assigns more than `capacity` at a time.
It is updated:      Announce -> Ready -> Go, then both sides send the weights. Between Ready and Go the
                    replica continues to play; with `drain` it starts no new turn.
It leaves:          Stop from the trainer; ReplicaEnds from the replica.
Both sides send signs of life regularly. A side that is silent for serving.timeout is lost.

A Done is sent, and kept in a checkpoint, as a PackedDone: token ids and log-probs as arrays of bytes. Ids
have 4 bytes and are never negative; log-probs have 8 bytes and arrive unchanged. The trainer's first rank
decodes the trajectories of all replicas in one thread, which shares Python's interpreter lock with its
training. As msgpack integers and floats, decoding and checking take twice as long.
"""

from __future__ import annotations

import operator
import socket
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import asdict, astuple

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Branch, Outcome, Task, Trajectory, Turn, Versions
from megatron_stppo.config import Config
from megatron_stppo.data.routes import dtype_of
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.spans import LayerSpec

MOST_BYTES = 2**26  # of one message: the tasks that a replica gets at once, or an episode of 10^6 tokens;
# limit_of returns more if an episode can be larger
ID, LOGPROB = np.dtype("<u4"), np.dtype("<f8")
# A log-prob is computed as x - logsumexp(x), and rounding can make it slightly positive.
LARGEST_LOGPROB = 1e-3


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

# token_ids, rollout_logprob, observation_ids, reward, versions; and prompt_ids, turns, routes
_PackedTurn = tuple[bytes, bytes, bytes, float, Versions]
_PackedBranch = tuple[bytes, tuple[_PackedTurn, ...], bytes]


class PackedDone(msgspec.Struct, frozen=True, tag="Done", forbid_unknown_fields=True):
    """A Done with the fields of its trajectory, except `branch`, which is 0 for a whole episode."""

    number: int
    task: Task
    prompt_ids: bytes
    turns: tuple[_PackedTurn, ...]
    outcome: Outcome
    group: int
    tool_calls: int
    valid_actions: int
    detail: str
    overlong_prompt: int
    routes: bytes
    branches: tuple[_PackedBranch, ...] = ()
    metrics: dict[str, float | None] = {}

    def unpack(self) -> Done:
        """Return the message. Raises ValueError for parts of numbers, log-probs above 0, wrong versions."""
        fields = asdict(self) | {
            "prompt_ids": _ids(self.prompt_ids),
            "turns": tuple(map(_turn, self.turns)),
            "branches": tuple(
                Branch(_ids(prompt), tuple(map(_turn, turns)), routes)
                for prompt, turns, routes in self.branches
            ),
        }
        return Done(fields.pop("number"), Trajectory(**fields))


def packed(done: Done) -> PackedDone:
    """Return the form in which a Done is sent. Raises struct.error for a negative token id."""
    fields = vars(done.trajectory) | {
        "prompt_ids": _bytes(done.trajectory.prompt_ids),
        "turns": tuple(map(_packed_turn, done.trajectory.turns)),
        "branches": tuple(
            (_bytes(branch.prompt_ids), tuple(map(_packed_turn, branch.turns)), branch.routes)
            for branch in done.trajectory.branches
        ),
    }
    del fields["branch"]
    return PackedDone(done.number, **fields)


def _packed_turn(turn: Turn) -> _PackedTurn:
    logprob = struct.pack(f"<{len(turn.rollout_logprob)}d", *turn.rollout_logprob)
    return _bytes(turn.token_ids), logprob, _bytes(turn.observation_ids), turn.reward, turn.versions


def _turn(packed: _PackedTurn) -> Turn:
    token_ids, logprob, observation_ids, reward, versions = packed
    values = np.frombuffer(logprob, LOGPROB)
    if (values > LARGEST_LOGPROB).any():  # False for NaN
        raise ValueError("a log-prob above 0")
    return Turn(_ids(token_ids), tuple(values.tolist()), _ids(observation_ids), reward, versions)


def encode_episodes(episodes: Sequence[Done]) -> bytes:
    """Return the file of a checkpoint with finished episodes that are not trained on; b"" if there are none.

    It may be large: 12 bytes per token, and with algorithm.routing_replay=rollout the experts of every token.
    """
    return msgspec.msgpack.encode([packed(done) for done in episodes]) if episodes else b""


def decode_episodes(content: bytes) -> list[Done]:
    """Return the episodes. Raises msgspec.MsgspecError or ValueError if another version wrote them."""
    decoded = msgspec.msgpack.decode(content, type=list[PackedDone]) if content else []
    return [done.unpack() for done in decoded]


def _bytes(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _ids(given: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(given, ID).tolist())


# What a decoder can raise: wrong type or format; nested too deeply; not UTF-8; a key that is a list
_FAILURES = msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError
_from_replica = msgspec.msgpack.Decoder(Hello | Ready | PackedDone | Alive | ReplicaEnds, strict=True)
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
        found = _from_replica.decode(payload)
        return found.unpack() if isinstance(found, PackedDone) else found
    except _FAILURES as error:
        raise ValueError(one_line(str(error))) from None


def unpack_from_trainer(payload: bytes) -> FromTrainer:
    """Return the message of the trainer. Raises msgspec.MsgspecError if it runs another version."""
    return _from_trainer.decode(payload)
