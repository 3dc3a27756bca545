"""Makes vLLM raise, or sample a wrong token, in its own code during a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fail_in_step(step: int) -> Callable[[], None]:
    """Make vLLM's scheduler raise once, in its step-th call. Return a function that undoes this."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, steps = Scheduler.schedule, iter(range(1, 1_000_000))

    def failing(scheduler: Any, *given: Any) -> Any:
        if next(steps) == step:
            raise MemoryError("no block is free")
        return schedule(scheduler, *given)

    Scheduler.schedule = failing  # type: ignore[method-assign]
    return lambda: setattr(Scheduler, "schedule", schedule)


def sample_wrongly_in_step(step: int) -> None:
    """Change the first token that vLLM's scheduler gets from the model in its step-th call."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update, steps = Scheduler.update_from_output, iter(range(1, 1_000_000))

    def wrong(scheduler: Any, scheduled: Any, output: Any) -> Any:
        if next(steps) == step:
            output.sampled_token_ids[0][0] ^= 1
        return update(scheduler, scheduled, output)

    Scheduler.update_from_output = wrong  # type: ignore[method-assign]
