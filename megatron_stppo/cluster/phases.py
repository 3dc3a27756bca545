"""Context managers around every phase of the loop: its deadline, its clock, and other observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

START_UP = "start_up"  # until the first phase begins
OTHER = "other"  # between two phases


class Phases:
    """`with phases("rollout"):` enters all of `around` with this name, the first one outermost.

    Example: Phases(watch.phase, metrics.phase).
    """

    def __init__(self, *around: Callable[[str], AbstractContextManager[None]]) -> None:
        self._around = around

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for enter in self._around:
                stack.enter_context(enter(name))
            yield
