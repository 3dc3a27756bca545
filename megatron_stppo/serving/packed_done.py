"""The form in which a Done is sent: token ids and log-probs as arrays of bytes.

The trainer's first rank decodes the trajectories of all replicas in one thread, which shares Python's
interpreter lock with its training. As msgpack integers and floats, decoding and checking take twice as long
(docs/asynchronous.md, "What the first rank handles").

Ids have 4 bytes and are never negative; log-probs have 8 bytes and arrive unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from megatron_stppo.serving.messages import Done
from megatron_stppo.types import Branch, Outcome, Task, Trajectory, Turn, Versions

ID, LOGPROB = np.dtype("<u4"), np.dtype("<f8")
# A log-prob is computed as x - logsumexp(x), and rounding can make it slightly positive.
LARGEST_LOGPROB = 1e-3


class _PackedTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    token_ids: bytes
    rollout_logprob: bytes
    observation_ids: bytes
    reward: float
    versions: Versions

    def unpack(self) -> Turn:
        logprob = np.frombuffer(self.rollout_logprob, LOGPROB)
        if (logprob > LARGEST_LOGPROB).any():  # False for NaN
            raise ValueError("a log-prob above 0")
        return Turn(
            _ids(self.token_ids),
            tuple(logprob.tolist()),
            _ids(self.observation_ids),
            self.reward,
            self.versions,
        )


class _PackedBranch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    prompt_ids: bytes
    turns: tuple[_PackedTurn, ...]
    routes: bytes

    def unpack(self) -> Branch:
        return Branch(_ids(self.prompt_ids), tuple(turn.unpack() for turn in self.turns), self.routes)


class PackedDone(msgspec.Struct, frozen=True, tag="Done", forbid_unknown_fields=True):
    """A Done with the fields of its trajectory, in the order of Trajectory."""

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
        return Done(
            self.number,
            Trajectory(
                self.task,
                _ids(self.prompt_ids),
                tuple(turn.unpack() for turn in self.turns),
                self.outcome,
                self.group,
                self.tool_calls,
                self.valid_actions,
                self.detail,
                self.overlong_prompt,
                self.routes,
                tuple(branch.unpack() for branch in self.branches),
                metrics=self.metrics,
            ),
        )


def packed(done: Done) -> PackedDone:
    """Return the form in which a Done is sent. Raises struct.error for a negative token id."""
    played = done.trajectory
    return PackedDone(
        done.number,
        played.task,
        _id_bytes(played.prompt_ids),
        _packed_turns(played.turns),
        played.outcome,
        played.group,
        played.tool_calls,
        played.valid_actions,
        played.detail,
        played.overlong_prompt,
        played.routes,
        tuple(
            _PackedBranch(_id_bytes(branch.prompt_ids), _packed_turns(branch.turns), branch.routes)
            for branch in played.branches
        ),
        played.metrics,
    )


def _packed_turns(turns: Sequence[Turn]) -> tuple[_PackedTurn, ...]:
    return tuple(
        _PackedTurn(
            _id_bytes(turn.token_ids),
            struct.pack(f"<{len(turn.rollout_logprob)}d", *turn.rollout_logprob),
            _id_bytes(turn.observation_ids),
            turn.reward,
            turn.versions,
        )
        for turn in turns
    )


def _id_bytes(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _ids(given: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(given, ID).tolist())
