"""What the first rank of an engine group sends between two engine steps, on two ranks without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.collect import RolloutSettings, _Rollout
from megatron_stppo.rollout.episodes.environment_host import Answer
from megatron_stppo.rollout.episodes.episode import Limits
from megatron_stppo.rollout.vllm.generation import RolloutError
from tests.ranks import run_ranks

ANSWER = Answer(3, result=StepResult("", 0.0, True, False, 0, "error", "the board fell over"))
SAID: tuple[Any, ...] = ((), (), (ANSWER, ANSWER), (), RolloutError("the host failed"))


def listen() -> list[tuple[Any, int]]:
    """Return, for each of SAID, what this rank got and the number of collectives that it took."""
    engine: Any = SimpleNamespace(unfinished=1)
    rollout = _Rollout(engine, RolloutSettings(Limits(1, 1, 1, 1)), None, None)
    left = iter(SAID)

    def take(wait_for: int) -> Any:
        said = next(left)
        if isinstance(said, RolloutError):
            raise said
        return said

    rollout._host = SimpleNamespace(take=take) if dist.get_rank() == 0 else None  # type: ignore[assignment]
    got = []
    for _ in SAID:
        before = _collectives()
        try:
            heard: Any = rollout._news(asked=1)
        except RolloutError as error:
            heard = str(error)
        got.append((heard, _collectives() - before))
    return got


def _collectives() -> int:
    return int(dist.group.WORLD._get_sequence_number_for_group())


def test_a_step_without_answers_costs_one_broadcast_and_one_with_answers_two() -> None:
    first, second = run_ranks(listen, 2)
    assert first == second
    assert first == [((), 1), ((), 1), ((ANSWER, ANSWER), 2), ((), 1), ("the host failed", 2)]
