"""tests.training.loop.searching with a vLLM that fails once, for environment.kind."""

from __future__ import annotations

from collections.abc import Callable

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment
from megatron_stppo.rollout.vllm.generation import Restarts
from tests.rollout.episodes.failing import fail_in_step
from tests.training.loop import searching


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Make all ranks fail in one step of the first rollout.

    Called on every rank before the engine is built.
    """
    fail_in_step(12)
    return searching.factory(config)


def in_new_process(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Make all ranks fail in a later rollout, and do not replace the engine in the process, as on a GPU."""
    plain = Restarts.__init__

    def on_gpu(restarts: Restarts, budget: int, *, in_process: bool) -> None:
        plain(restarts, budget, in_process=False)

    Restarts.__init__ = on_gpu  # type: ignore[method-assign]
    fail_in_step(40)
    return searching.factory(config)


def of_broken_gpu(config: EnvironmentConfig) -> Callable[[], Environment]:
    """The same, with a GPU that does not work any more."""
    process.gpu_failed = lambda: True
    return in_new_process(config)
