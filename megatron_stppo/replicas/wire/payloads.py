"""The payloads of the transport: messages in msgpack, decoded into the unions of messages.py.

A Done is sent as a PackedDone.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from megatron_stppo.base.printing import one_line
from megatron_stppo.config import Config
from megatron_stppo.data.routes import dtype_of
from megatron_stppo.replicas.wire.messages import (
    MOST_BYTES,
    Alive,
    Done,
    FromReplica,
    FromTrainer,
    Hello,
    Leaving,
    Ready,
    ReplicaFailed,
)
from megatron_stppo.replicas.wire.packed_done import PackedDone, packed
from megatron_stppo.weights.sharding.hf_names import ModelShape

# What a decoder can raise: wrong type or format; nested too deeply; not UTF-8; a key that is a list
_FAILURES = msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError
_encoder = msgspec.msgpack.Encoder()
_from_replica = msgspec.msgpack.Decoder(
    Hello | Ready | PackedDone | Alive | ReplicaFailed | Leaving, strict=True
)
_from_trainer = msgspec.msgpack.Decoder(FromTrainer, strict=True)


@dataclass(frozen=True)
class Unreadable:
    """Listener.take returns it in place of a message that cannot be decoded.

    The peer runs another version, or is hostile.
    Example: Unreadable("Invalid value 'Stop' - at `$.type`").
    """

    why: str  # one printable line


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
    payload = _encoder.encode(packed(message) if isinstance(message, Done) else message)
    if len(payload) > max_bytes:
        name = type(message).__name__
        raise ValueError(f"a message {name} of {len(payload)} bytes exceeds the limit of {max_bytes}")
    return payload


def unpack_from_replica(payload: bytes) -> FromReplica | Unreadable:
    """Return the message of a replica. Never raises: the payload may be anything."""
    try:
        found = _from_replica.decode(payload)
        return found.unpack() if isinstance(found, PackedDone) else found
    except _FAILURES as error:
        return Unreadable(one_line(str(error)))


def unpack_from_trainer(payload: bytes) -> FromTrainer:
    """Return the message of the trainer. Raises msgspec.MsgspecError if it runs another version."""
    return _from_trainer.decode(payload)


ALIVE = pack(Alive(), 100)  # the trainer's sign of life
