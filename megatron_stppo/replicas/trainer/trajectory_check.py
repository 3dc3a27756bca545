"""Checks that a trajectory which a replica has sent is possible. A replica may be broken, or hostile.

This is about one message alone. Decoding has refused negative token ids and log-probs above 0
(packed_done.py). reception.py checks that the episode was assigned to the replica and is not sent twice, and
uses the trainer's own copy of the task. Numbers that are not finite pass: the update refuses
them, in every mode (data/finite.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import combinations

import numpy as np

from megatron_stppo.data.routes import dtype_of
from megatron_stppo.data.structure import episode_fault, ids_fault, turn_fault
from megatron_stppo.environments.contract import MAX_METRICS, METRIC
from megatron_stppo.replicas.wire.messages import Done
from megatron_stppo.types import Trajectory, Turn


def fault(
    done: Done,
    *,
    held: Collection[int],
    vocabulary: int,
    max_context: int,
    experts: int = 0,
    routes: tuple[int, int] = (0, 0),
) -> str:
    """Return why the message is not possible, in one printable line, or "". Takes linear time.

    held: versions that the trainer has sent to this replica. max_context: rollout.max_context, in tokens.
    experts: of a layer. routes: layers and experts per token if experts are recorded, zeros otherwise.
    Example: "turn 0: version 7 was never sent to this replica".
    """
    if reason := _trajectory_fault(done.trajectory):
        return reason
    for played in done.trajectory.histories():
        reason = _history_fault(played, held, vocabulary, max_context, experts, routes)
        if reason:
            return f"branch {played.branch}: {reason}" if played.branch else reason
    return ""


def _history_fault(
    played: Trajectory,
    held: Collection[int],
    vocabulary: int,
    max_context: int,
    experts: int,
    routes: tuple[int, int],
) -> str:
    """Arguments as of `fault`."""
    length = len(played.prompt_ids)
    if played.turns and not length:
        return "turns without a prompt"
    if played.branch and not played.turns:
        return "no turns"
    if reason := ids_fault("prompt", played.prompt_ids, vocabulary):
        return reason
    last = -1
    for number, turn in enumerate(played.turns):
        reason = turn_fault(turn, vocabulary) or _version_fault(turn, held, last)
        if reason:
            return f"turn {number}: {reason}"
        last = turn.versions[-1][0]
        length += len(turn.token_ids) + len(turn.observation_ids)
    if length > max_context:
        return f"{length} tokens exceed rollout.max_context={max_context}"
    return _routes_fault(played.routes, length - 1 if played.turns else 0, routes, experts)


def _trajectory_fault(played: Trajectory) -> str:
    if reason := episode_fault(played):
        return reason
    if played.branch:
        return "a branch without its episode"
    turns = len(played.turns) + sum(len(branch.turns) for branch in played.branches)
    if len(played.metrics) > MAX_METRICS * (turns + 1) or not all(map(METRIC.fullmatch, played.metrics)):
        return "metrics that no environment can have"
    if not all(value is None or math.isfinite(value) for value in played.metrics.values()):
        return "a metric that is not a finite number"
    return ""


def _version_fault(turn: Turn, held: Collection[int], last: int) -> str:
    """last: the version of the last token of the turn before."""
    for version, _ in turn.versions:
        if version not in held:
            return f"version {version} was never sent to this replica"
        if version < last:
            return f"version {version} after version {last}"
        last = version
    return ""


def _routes_fault(given: bytes, tokens: int, routes: tuple[int, int], experts: int) -> str:
    """Check the experts of the first `tokens` tokens. Arguments as of `fault`.

    A token's experts in one layer must differ, because the dispatcher makes one row for each of them.
    """
    layers, chosen = routes
    dtype = dtype_of(experts)
    expected = tokens * layers * chosen * dtype.itemsize
    if len(given) != expected:
        return f"{len(given)} bytes of experts instead of {expected}"
    if not expected:
        return ""
    numbers = np.frombuffer(given, dtype=str(dtype).removeprefix("torch."))
    if not 0 <= numbers.min() <= numbers.max() < experts:
        return f"an expert outside 0 to {experts - 1}"
    # pairs of columns: this is in the thread that serves all replicas, and sorting takes 8 times as long
    columns = np.ascontiguousarray(numbers.reshape(-1, chosen).T)
    if any((one == other).any() for one, other in combinations(columns, 2)):
        return "an expert that is chosen twice for one token"
    return ""
