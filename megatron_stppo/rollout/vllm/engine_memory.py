"""The GPU memory that an engine releases while the trainer computes. On a CPU everything stays in memory.

At level 2, vLLM drops everything that was allocated while it loaded the model and keeps a copy of the buffers
only: the parameters come back with undefined content, which the reshard overwrites, and so does any tensor
that a layer keeps as a plain attribute, which nothing overwrites.
"""

from __future__ import annotations

from typing import Any, Literal

from megatron_stppo.rollout.vllm.vllm_setup import on_cpu

Part = Literal["weights", "kv_cache"]
LEVEL = 2


class EngineMemory:
    """Which parts of an engine's memory are released. core: vLLM's client of an engine in this process."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._asleep: set[Part] = set()

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self, failed: bool) -> None:
        """Release both parts. failed: vLLM raised an error, so the state of its scheduler is undefined."""
        if not self._asleep and not on_cpu():
            if failed:  # only the memory
                self._core.engine_core.model_executor.sleep(LEVEL)
            else:
                self._core.sleep(LEVEL)
        self._asleep = {"weights", "kv_cache"}

    def wake(self, part: Part) -> bool:
        """Allocate a part that is released. Return whether its content is undefined: never on a CPU."""
        dropped = part in self._asleep and not on_cpu()
        if dropped:
            self._core.wake_up([part])
        self._asleep.discard(part)
        return dropped
