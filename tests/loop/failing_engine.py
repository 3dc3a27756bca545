"""tests.loop.searching in a process whose vLLM fails once: environment.kind=tests.loop.failing_engine."""

from __future__ import annotations

from collections.abc import Callable

from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment
from tests.loop import searching
from tests.rollout.failing import fail_in_step


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Called before a run builds its engine, on every rank: all fail in one step of the first rollout."""
    fail_in_step(12)
    return searching.factory(config)
