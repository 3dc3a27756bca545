"""What a replica must have in common with the trainer, and which episodes it can send.

A replica may be broken, or hostile. Decoding has refused negative token ids and log-probs above 0
(wire/messages.py). crew.py checks that the episode was assigned to the replica and is not sent twice, and
uses the trainer's own copy of the task. Numbers that are not finite pass: the update refuses them, in every
mode (data/validity.py).
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config.run import NAME
from megatron_stppo.data.routes import dtype_of
from megatron_stppo.data.validity import episode_fault, ids_fault, turn_fault
from megatron_stppo.environments.contract import MAX_METRICS, METRIC
from megatron_stppo.replicas.wire.episodes import PackedRecord, unpack_record
from megatron_stppo.replicas.wire.messages import Hello

NO_TASK = Task("", (), (), "train", 0)
SHOWN = 16  # characters of a value that differs, such as a hash
# What must be equal, and what to do if it is not.
REMEDIES = {
    "model": "copy model.path from the trainer's machine: shape, tokenizer or end-of-text ids differ",
    "vocabulary": "copy model.path from the trainer's machine",
    "dtype": "set model.dtype for the run; auto differs between machines with and without a GPU",
    "vllm": "install the trainer's packages",
}


@dataclass(frozen=True)
class Expected:
    """What a replica must have in common with the trainer, and the largest episode.

    Example: Expected("3f..", 151936, "bfloat16", "0.32.0", 32768).
    """

    model: str  # model_digest()
    vocabulary: int
    dtype: str
    vllm: str  # version
    max_context: int  # tokens
    experts: int = 0  # of a layer
    routes: tuple[int, int] = (0, 0)  # layers and experts per token if replicas record experts
    tensor: frozenset[int] = frozenset({1})  # numbers of ranks over which vLLM can shard the model

    def refusal(self, hello: Hello) -> str:
        """Return why a replica is refused, or ""."""
        if not re.fullmatch(NAME, hello.name):
            return (
                f"--name={hello.name[:80]!r}: give up to 64 letters, digits, '.', '_' and '-', no leading '.'"
            )
        if hello.tensor not in self.tensor or hello.capacity < 1:
            return (
                f"rollout.engine_tensor={hello.tensor}, serving.concurrency={hello.capacity} of the replica "
                f"{hello.name}: no replica of this model has them; choose an engine_tensor of "
                f"{sorted(self.tensor)} and a concurrency of at least 1"
            )
        for name, remedy in REMEDIES.items():
            mine, theirs = getattr(self, name), getattr(hello, name)
            if mine != theirs:
                of_replica, of_trainer = (str(value)[:SHOWN] for value in (theirs, mine))
                return (
                    f"{name}={of_replica} of the replica {hello.name} differs from the trainer's "
                    f"{of_trainer}; {remedy}"
                )
        return ""

    def fault(self, played: Trajectory, held: Collection[int]) -> str:
        """Return why an episode is not possible, in one printable line, or "". Takes linear time.

        held: versions that the trainer has sent to this replica.
        Example: "turn 0: version 7 was never sent to this replica".
        """
        if reason := _trajectory_fault(played):
            return reason
        for history in played.histories():
            if reason := self._history_fault(history, held):
                return f"branch {history.branch}: {reason}" if history.branch else reason
        return ""

    def record_fault(self, record: PackedRecord, held: Collection[int]) -> str:
        """Return why an episode in progress cannot have played this, or ""."""
        try:
            for history in unpack_record(record):
                if not history.turns or any(turn.reason is None for turn in history.turns[:-1]):
                    return "no turns, or one that is not complete before another"
                turns = tuple(
                    Turn(turn.token_ids, turn.logprobs, turn.observation_ids, 0.0, turn.versions)
                    for turn in history.turns
                )
                played = Trajectory(NO_TASK, history.prompt_ids, turns, "ok")
                if reason := self._history_fault(played, held):
                    return reason
        except ValueError as error:
            return one_line(str(error))
        return ""

    def _history_fault(self, played: Trajectory, held: Collection[int]) -> str:
        length = len(played.prompt_ids)
        if played.turns and not length:
            return "turns without a prompt"
        if played.branch and not played.turns:
            return "no turns"
        if reason := ids_fault("prompt", played.prompt_ids, self.vocabulary):
            return reason
        last = -1
        for number, turn in enumerate(played.turns):
            reason = turn_fault(turn, self.vocabulary) or _version_fault(turn, held, last)
            if reason:
                return f"turn {number}: {reason}"
            last = turn.versions[-1][0]
            length += len(turn.token_ids) + len(turn.observation_ids)
        if length > self.max_context:
            return f"{length} tokens exceed rollout.max_context={self.max_context}"
        return self._routes_fault(played.routes, length - 1 if played.turns else 0)

    def _routes_fault(self, routes: bytes, tokens: int) -> str:
        """Check the experts of the first `tokens` tokens.

        A token's experts in one layer must differ, because the dispatcher makes one row for each of them.
        """
        layers, chosen = self.routes
        dtype = dtype_of(self.experts)
        expected = tokens * layers * chosen * dtype.itemsize
        if len(routes) != expected:
            return f"{len(routes)} bytes of experts instead of {expected}"
        if not expected:
            return ""
        numbers = np.frombuffer(routes, dtype=str(dtype).removeprefix("torch."))
        if not 0 <= numbers.min() <= numbers.max() < self.experts:
            return f"an expert outside 0 to {self.experts - 1}"
        # pairs of columns: this is in the thread that serves all replicas, and sorting takes 8 times as long
        columns = np.ascontiguousarray(numbers.reshape(-1, chosen).T)
        if any((left == right).any() for left, right in combinations(columns, 2)):
            return "an expert that is chosen twice for one token"
        return ""


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
