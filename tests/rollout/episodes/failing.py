"""Makes vLLM raise in its own code during a rollout."""

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
