"""The steps and requests of vLLM that are under way when new weights arrive.

With asynchronous scheduling (on a GPU), vLLM begins a step before it returns the tokens of the step before.
With vLLM's synchronous scheduler (on a CPU), no step is under way between two calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.interface import PauseState


def steps_under_way(core: Any) -> bool:
    """Return whether a vLLM core has begun steps whose tokens it has not returned."""
    return bool(core.batch_queue)


@contextmanager
def no_new_steps(core: Any) -> Iterator[None]:
    """Inside the context, the core schedules no tokens: its steps only return those that are under way."""
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        yield
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)


def computed_tokens(core: Any) -> int:
    """Return the number of tokens of running requests whose keys and values have been computed."""
    return sum(request.num_computed_tokens for request in core.scheduler.running)
