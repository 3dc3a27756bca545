"""What the first rank of an engine group sends between two engine steps, on two ranks without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.collect import answers_of
from megatron_stppo.rollout.episodes.environment_host import Answer
from megatron_stppo.rollout.vllm.generation import RolloutError
from tests.ranks import run_ranks

ANSWER = Answer(3, result=StepResult("", 0.0, True, False, 0, "error", "the board fell over"))
SAID: tuple[Any, ...] = ((), (), (ANSWER, ANSWER), (), RolloutError("the host failed"))


def listen() -> list[tuple[Any, int]]:
    """Return, for each of SAID, what this rank got and the number of collectives that it took."""
    left = iter(SAID)

    def take(wait_for: int) -> Any:
        said = next(left)
        if isinstance(said, RolloutError):
            raise said
        return said

    host: Any = SimpleNamespace(take=take) if dist.get_rank() == 0 else None
    got = []
    for _ in SAID:
        before = _collectives()
        try:
            heard: Any = answers_of(host, 0, None)
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
