"""The result of one generation request, and the errors of generation.

This module does not import vLLM, so that episodes can be built and tested without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_stppo.base.types import Versions

Reason = Literal["stop", "end", "length"]  # a stop string, the end-of-text token, max_tokens or the context


class RolloutError(RuntimeError):
    """A rollout cannot continue: no synchronised weights, a failed engine, or a blocking environment."""


class EngineFailure(RolloutError):
    """vLLM raised an error during generation; a new engine may replace it (restart.py).

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
