"""Makes vLLM fail, in its own code and in the middle of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fail_in_step(step: int) -> Callable[[], None]:
    """From now on vLLM's scheduler raises in its step-th call, once; the result undoes it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, steps = Scheduler.schedule, iter(range(1, 1_000_000))

    def failing(scheduler: Any, *given: Any) -> Any:
        if next(steps) == step:
            raise MemoryError("no block is free")
        return schedule(scheduler, *given)

    Scheduler.schedule = failing  # type: ignore[method-assign]
    return lambda: setattr(Scheduler, "schedule", schedule)
