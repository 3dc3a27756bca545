"""Measures what a replica does, for the counters in its signs of life."""

from __future__ import annotations

from megatron_stppo.replicas.wire.messages import Counters


class Activity:
    """The counters of a replica since its first weights, which another thread may read.

    Times are seconds of a monotonic clock.

    An update that interrupts turns pauses them from the last engine step before it to the first one after it.
    Otherwise the pause is the time of the update itself.
    Example: after the first weights, a step that ends at 1.0, updated(1.1, 1.4, 50, True), and a step that
    begins at 1.5 are a pause of 0.5 s.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self._joined: float | None = None
        self._last_step = 0.0  # its end
        self._paused: float | None = None  # begin of the pause

    def waited(self, began: float, ended: float) -> None:
        """Add a wait for news."""
        if self._joined is not None:
            self.counters.idle_seconds += ended - began
            self.counters.seconds = ended - self._joined

    def stepped(self, began: float, ended: float) -> None:
        """Add an engine step."""
        assert self._joined is not None, "the engine has no weights"
        if self._paused is not None:
            self._add_pause(began - self._paused)
        self._last_step, self._paused = ended, None
        self.counters.steps += 1
        self.counters.step_seconds += ended - began
        self.counters.seconds = ended - self._joined

    def updated(self, began: float, ended: float, recomputed: int, interrupts: bool) -> None:
        """Add an update of the weights; the first one begins the count.

        recomputed: see Counters. interrupts: whether turns wait for it.
        """
        if self._joined is None:
            self._joined = ended
            return
        self.counters.recomputed += recomputed
        if interrupts:
            self._paused = self._last_step or began
        else:
            self._add_pause(ended - began)

    def gave(self, began: float, ended: float) -> None:
        """Add the time in which weights were sent to another replica: a pause that belongs to the update."""
        self.counters.pause_seconds += ended - began
        self.counters.longest_pause = max(self.counters.longest_pause, ended - began)

    def played(self, tokens: int, episodes: int) -> None:
        """Set how many tokens were generated, and add episodes that have ended."""
        self.counters.tokens = tokens
        self.counters.episodes += episodes

    def _add_pause(self, seconds: float) -> None:
        self.counters.updates += 1
        self.counters.pause_seconds += seconds
        self.counters.longest_pause = max(self.counters.longest_pause, seconds)
