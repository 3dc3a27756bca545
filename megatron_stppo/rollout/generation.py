"""What the engine hands back for one request. Free of vLLM: episodes can be followed without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "end", "length"]  # a stop string, the end-of-text token, max_tokens or the context


class RolloutError(RuntimeError):
    """Generation cannot go on: weights out of step, or an engine failure."""


class EngineFailure(RolloutError):
    """vLLM raised while it generated: a new engine may take over, resharded and verified (restart.py).

    place: of the error, and the engine's step in this rollout; the same failure again has the same.
    Example: EngineFailure("vLLM failed: ...", "ValueError at scheduler.py:310 in step 12").
    """

    def __init__(self, message: str, mesh: str) -> None:
        super().__init__(message)
        self.mesh = mesh


@dataclass(frozen=True)
class Finished:
    """One generation, complete. Example: Finished("7", (5, 9), (-0.1, -2.0), "stop", 3)."""

    request_id: str
    token_ids: tuple[int, ...]  # n >= 1, all that was emitted, the stopping token included
    logprobs: tuple[float, ...]  # n, natural log, after temperature and top_p: of what was sampled from
    reason: Reason
    version: int  # of the weights that wrote it
