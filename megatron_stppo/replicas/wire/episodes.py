"""Episodes on the wire and in a checkpoint: complete ones, and what others have played so far.

Token ids and log-probs are arrays of bytes. Ids have 4 bytes and are never negative; log-probs have 8 bytes
and arrive unchanged. The trainer's first rank decodes the episodes of all replicas in one thread, which
shares Python's interpreter lock with its training. As msgpack integers and floats, decoding and checking take
twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec.structs import asdict

from megatron_stppo.base.types import Branch, Outcome, Task, Trajectory, Turn, Versions
from megatron_stppo.rollout.vllm.generation import Reason, Record, RecordedHistory, RecordedTurn

ID, LOGPROB = np.dtype("<u4"), np.dtype("<f8")
# A log-prob is computed as x - logsumexp(x), and rounding can make it slightly positive.
LARGEST_LOGPROB = 1e-3


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An episode has ended."""

    number: int
    trajectory: Trajectory


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
            "prompt_ids": unpack_ids(self.prompt_ids),
            "turns": tuple(map(_turn, self.turns)),
            "branches": tuple(
                Branch(unpack_ids(prompt), tuple(map(_turn, turns)), routes)
                for prompt, turns, routes in self.branches
            ),
        }
        return Done(fields.pop("number"), Trajectory(**fields))


def packed(done: Done) -> PackedDone:
    """Return the form in which a Done is sent. Raises struct.error for a negative token id."""
    fields = vars(done.trajectory) | {
        "prompt_ids": pack_ids(done.trajectory.prompt_ids),
        "turns": tuple(map(_packed_turn, done.trajectory.turns)),
        "branches": tuple(
            (pack_ids(branch.prompt_ids), tuple(map(_packed_turn, branch.turns)), branch.routes)
            for branch in done.trajectory.branches
        ),
    }
    del fields["branch"]
    return PackedDone(done.number, **fields)


def _packed_turn(turn: Turn) -> _PackedTurn:
    logprob = struct.pack(f"<{len(turn.rollout_logprob)}d", *turn.rollout_logprob)
    return pack_ids(turn.token_ids), logprob, pack_ids(turn.observation_ids), turn.reward, turn.versions


def _turn(packed: _PackedTurn) -> Turn:
    token_ids, logprob, observation_ids, reward, versions = packed
    return Turn(unpack_ids(token_ids), _logprobs(logprob), unpack_ids(observation_ids), reward, versions)


# token_ids, logprobs, versions, reason, observation_ids; and prompt_ids, turns
_RecordedTurn = tuple[bytes, bytes, Versions, Reason | None, bytes]
PackedRecord = tuple[tuple[bytes, tuple[_RecordedTurn, ...]], ...]


class Unfinished(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What an episode has played so far."""

    number: int
    record: PackedRecord

    @classmethod
    def of(cls, number: int, record: Record) -> Unfinished:
        return cls(
            number,
            tuple(
                (pack_ids(history.prompt_ids), tuple(map(_packed_recorded, history.turns)))
                for history in record
            ),
        )


def unpack_record(packed: PackedRecord) -> Record:
    """Return the record. Raises ValueError for parts of numbers, and log-probs above 0."""
    return tuple(
        RecordedHistory(unpack_ids(prompt), tuple(map(_recorded, turns))) for prompt, turns in packed
    )


def _packed_recorded(turn: RecordedTurn) -> _RecordedTurn:
    logprobs = struct.pack(f"<{len(turn.logprobs)}d", *turn.logprobs)
    return pack_ids(turn.token_ids), logprobs, turn.versions, turn.reason, pack_ids(turn.observation_ids)


def _recorded(packed: _RecordedTurn) -> RecordedTurn:
    ids, logprobs, versions, reason, observation = packed
    return RecordedTurn(unpack_ids(ids), _logprobs(logprobs), versions, reason, unpack_ids(observation))


def _logprobs(packed: bytes) -> tuple[float, ...]:
    values = np.frombuffer(packed, LOGPROB)
    if (values > LARGEST_LOGPROB).any():  # False for NaN
        raise ValueError("a log-prob above 0")
    return tuple(values.tolist())


def encode_episodes(finished: Iterable[Done], unfinished: Iterable[Unfinished]) -> bytes:
    """Return the file of a checkpoint with episodes that are not trained on; b"" if there are none.

    It may be large: 12 bytes per token, and with algorithm.routing_replay=rollout the experts of every token.
    """
    episodes = [*map(packed, finished), *unfinished]
    return msgspec.msgpack.encode(episodes) if episodes else b""


def decode_episodes(content: bytes) -> tuple[list[Done], list[Unfinished]]:
    """Return the finished episodes and the others.

    Raises msgspec.MsgspecError or ValueError if another version wrote them.
    """
    episodes = msgspec.msgpack.decode(content, type=list[PackedDone | Unfinished]) if content else []
    unfinished = [episode for episode in episodes if isinstance(episode, Unfinished)]
    return [episode.unpack() for episode in episodes if isinstance(episode, PackedDone)], unfinished


def pack_ids(ids: Sequence[int]) -> bytes:
    """Raises struct.error for a negative token id."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, ID).tolist())


def versions_of(record: PackedRecord) -> set[int]:
    """Return the versions of a record's tokens."""
    return {version for _, turns in record for _, _, versions, *_ in turns for version, _ in versions}
