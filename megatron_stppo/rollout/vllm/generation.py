"""The result of one generation request, the turns of episodes in progress, the errors of generation, and how
often a failed engine is replaced.

This module does not import vLLM, so that episodes can be built and tested without an engine.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_stppo.base.errors import DoNotRestart, EngineLost
from megatron_stppo.base.types import Versions

log = logging.getLogger(__name__)
Reason = Literal["stop", "end", "length"]  # a stop string, the end-of-text token, max_tokens or the context


class RolloutError(RuntimeError):
    """A rollout cannot continue: no synchronised weights, a failed engine, or a blocking environment."""


class EngineFailure(RolloutError):
    """vLLM raised an error during generation; a new engine may replace it (Restarts).

    The new engine has to be resharded and verified before it generates.
    place: where the error was raised, and in which engine step of the rollout; equal if the failure is
    repeated.
    Example: EngineFailure("vLLM failed: ...", "ValueError at scheduler.py:310 in step 12").
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Finished:
    """One complete generation. Example: Finished("7", (5, 9), (-0.1, -2.0), "stop", ((3, 2),))."""

    request_id: str
    token_ids: tuple[int, ...]  # n >= 1, all emitted tokens, including the one that stopped the generation
    logprobs: tuple[float, ...]  # n, natural log, after temperature and top_p (the sampled distribution)
    reason: Reason
    versions: Versions  # of the weights that computed the n tokens
    # [prompt + n - 1, layers, k]: the experts of all tokens that the engine has read, as in Trajectory.routes
    routes: bytes = b""


@dataclass(frozen=True)
class RecordedTurn:
    """A turn, complete or not. Example: RecordedTurn((5, 9), (-0.1, -2.0), ((3, 2),)) is not complete."""

    token_ids: tuple[int, ...]  # n >= 1
    logprobs: tuple[float, ...]  # n
    versions: Versions  # of the n tokens
    reason: Reason | None = None  # why it ended; None: it is not complete
    observation_ids: tuple[int, ...] = ()  # what the policy read after it

    def finished(self, request_id: str) -> Finished:
        assert self.reason is not None, "the turn is complete"
        return Finished(request_id, self.token_ids, self.logprobs, self.reason, self.versions)


@dataclass(frozen=True)
class RecordedHistory:
    """The turns of one conversation. Example: RecordedHistory((1, 2), (turn,)) read (1, 2) first."""

    prompt_ids: tuple[int, ...]
    turns: tuple[RecordedTurn, ...]


Record = tuple[RecordedHistory, ...]


class Recall:
    """The turns of a record, by the tokens that the policy read before them, with which another engine
    continues an episode in progress, also after a restart.

    The episode begins anew: its environment is reset with the same seed, and its tools are called again. But
    where the policy would read the same tokens as before, its turn is not generated again: it is the recorded
    one, with its log-probs and versions. A turn that was not complete is continued after its last token.
    Where the policy reads something else, because a tool or an agent answered differently, turns are
    generated as usual. So no token follows a context in which it was not generated.

    Example: with record = (RecordedHistory((1, 2), (turn,)),), Recall(record).next((1, 2), 100) is `turn`,
    and a second call returns None.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._turns: dict[tuple[int, ...], deque[RecordedTurn]] = defaultdict(deque)
        for history in record:
            context = history.prompt_ids
            for turn in history.turns:
                self._turns[context].append(turn)
                context += turn.token_ids + turn.observation_ids

    def __bool__(self) -> bool:
        """Whether turns are left."""
        return any(self._turns.values())

    def has_only(self, version: int) -> bool:
        """Return whether all recorded tokens are of this version."""
        turns = (turn for history in self.record for turn in history.turns)
        return all(known == version for turn in turns for known, _ in turn.versions)

    def next(self, context: Sequence[int], most: int) -> RecordedTurn | None:
        """Return the turn that follows this context, once; None if there is none, or if it has more than
        `most` tokens, or as many and is not complete."""
        turns = self._turns.get(tuple(context))
        if not turns:
            return None
        turn = turns.popleft()
        return turn if len(turn.token_ids) < most + (turn.reason is not None) else None


class Restarts:
    """Count of the engine restarts of a run.

    in_process: whether a new engine can be built in this process. On a GPU it cannot: vLLM refuses to start
    unless gpu_memory_utilization of the GPU is free, which the trainer occupies, and after an illegal
    address no call of CUDA in this process succeeds.
    The state is equal on all ranks, because an EngineFailure is raised on all ranks.
    Example: with budget=1 the first failure is counted; the next one is raised.
    """

    def __init__(self, budget: int, *, in_process: bool = True) -> None:
        self._budget, self._in_process, self.count = budget, in_process, 0
        self._last: tuple[int, str] | None = None

    def passed(self) -> None:
        """Record that a rollout succeeded, and forget the last failure.

        Evaluations use the same seed again, so a later failure at the same place is not a repetition.
        """
        self._last = None

    def admit(self, failure: EngineFailure, seed: int) -> None:
        """Count a failure of the rollout with this seed. If this returns, the caller builds a new engine.

        Raises DoNotRestart if the same failure occurs again at the same place of the same rollout, because it
        would occur in a new process too. Raises `failure` itself when the budget is spent, and EngineLost if
        the new engine needs a new process.
        """
        place = (seed, failure.place)
        if place == self._last:
            raise DoNotRestart(f"a new engine failed at the same place: {failure}") from failure
        if self.count >= self._budget:
            raise failure
        if not self._in_process:
            raise EngineLost(str(failure)) from failure
        self._last, self.count = place, self.count + 1
        log.error("engine restart %d of at most %d: %s", self.count, self._budget, failure)
