"""tests.loop.searching with a vLLM that fails once. Use environment.kind=tests.loop.failing_engine."""

from __future__ import annotations

from collections.abc import Callable

from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment
from tests.loop import searching
from tests.rollout.failing import fail_in_step


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Make all ranks fail in one step of the first rollout.

    Called on every rank before the engine is built.
    """
    fail_in_step(12)
    return searching.factory(config)
