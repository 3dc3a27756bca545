"""Simulate asynchronous training: a trainer, and replicas that play episodes while it trains.

This follows docs/asynchronous.md. In iteration v the trainer requests batch v and waits until it is complete.
Then it computes scores, advantages and updates, and publishes version v + 1 to one replica after the other.
Admitted episodes are given to the replica with the fewest episodes in progress.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial

from megatron_stppo.plan.simulation.buffer import BatchRule, EpisodeBuffer
from megatron_stppo.plan.simulation.clock import Clock
from megatron_stppo.plan.simulation.forecast import Forecast, shares
from megatron_stppo.plan.simulation.publication import Publication
from megatron_stppo.plan.simulation.replica import EpisodeInPlay, ReplicaModel, UpdateKind
from megatron_stppo.plan.simulation.speeds import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.workload import EpisodeSource


@dataclass(frozen=True)
class AsynchronousRun:
    """What is simulated. Seconds are those of the machine that is planned for."""

    work: EpisodeSource
    rule: BatchRule
    engine: EngineSpeed  # of each replica
    trainer: TrainerSpeed
    replicas: int = 1
    concurrency: int = 256  # episodes in progress per replica
    update: UpdateKind = "recompute"
    transfer: float = 0.0  # seconds to send the weights to one replica
    publish: float = 0.0  # further seconds of the trainer for each version, before and after the transfers


@dataclass(frozen=True)
class Window:
    """The iterations that are measured: `count` of them, after the first `skipped`."""

    skipped: int = 4
    count: int = 12


def simulate(run: AsynchronousRun, window: Window | None = None) -> Forecast:
    """Return the forecast of asynchronous training.

    The first iterations are left out by default: they begin with empty replicas.
    """
    window = window or Window(4 + 2 * run.rule.staleness)
    return AsynchronousSimulation(run, window).run()


@dataclass(frozen=True)
class _Totals:
    """Sums from the start of the simulation to one moment."""

    now: float
    waiting: float
    training: float
    stepping: float
    paused: float
    recomputed: float
    in_flight: float  # episodes times seconds
    calls_waiting: float  # calls of tools times seconds
    buffered: float  # episodes times seconds
    steps: int
    generated: int


class AsynchronousSimulation:
    """A run in simulated time. `batches` are those that were trained on, from iteration 0."""

    def __init__(self, run: AsynchronousRun, window: Window) -> None:
        self._run, self._window = run, window
        self._clock = Clock()
        self.buffer = EpisodeBuffer(run.rule)
        make = partial(ReplicaModel, self._clock, run.engine, run.work.tools.at_once, self._ended, run.update)
        self._replicas = [make() for _ in range(run.replicas)]
        self._version = -1
        self._asked_at: float | None = None  # while the trainer waits
        self._trained_at: float | None = None  # while the version waits for episodes before it is published
        self._waiting = self._training = 0.0
        self._in_flight = self.buffered = self._counted = 0.0
        self.batches: list[tuple[EpisodeInPlay, ...]] = []
        self._asks: list[float] = []  # when the measured iterations began, and when the last one ended
        self._first: _Totals | None = None
        self._last: _Totals | None = None

    def run(self) -> Forecast:
        self._ask()
        self._clock.run(lambda: self._last is not None)
        return self._forecast()

    def _ask(self) -> None:
        """Begin the next iteration: admit episodes, and ask for a batch."""
        self._version += 1
        self._look()
        if self._version >= self._window.skipped:
            self._asks.append(self._clock.now)
        if self._version == self._window.skipped:
            self._first = self._totals()
        elif self._version == self._window.skipped + self._window.count:
            self._last = self._totals()
            return
        self._asked_at = self._clock.now
        self._admit()
        self._take()

    def _admit(self) -> None:
        """Give episodes to replicas until their places, or the episodes that may be admitted, are used up."""
        while self.buffer.may_admit(self._version):
            replica = min(self._replicas, key=lambda one: one.in_flight)
            if replica.in_flight >= self._run.concurrency:
                break
            number = self.buffer.admitted
            episode = EpisodeInPlay(number, self._run.work.episode(number), self._version)
            self._look()
            self.buffer.admit(episode)
            replica.admit(episode)

    def _ended(self, episode: EpisodeInPlay) -> None:
        self._look(ended=1)
        self.buffer.add(episode)
        self._admit()
        self._take()
        self._publish()

    def _take(self) -> None:
        """Train if the trainer waits and its batch is complete."""
        if self._asked_at is None:
            return
        self._look()
        batch = self.buffer.take()
        if not batch:
            return
        self._waiting += self._clock.now - self._asked_at
        self._asked_at = None
        self.batches.append(tuple(batch))
        seconds = self._run.trainer.seconds(sum(one.plan.sizes.tokens for one in batch))
        self._training += seconds
        self._clock.at(self._clock.now + seconds, self._trained)

    def _trained(self) -> None:
        self._trained_at = self._clock.now
        self._publish()

    def _publish(self) -> None:
        """Send a new version, and begin the next iteration. Nothing happens if there is none, or if episodes
        must end first."""
        run, clock = self._run, self._clock
        completes = run.update == "complete" and any(replica.in_flight for replica in self._replicas)
        if self._trained_at is None or completes:
            return
        self._waiting += clock.now - self._trained_at
        self._trained_at = None

        def published() -> None:
            clock.at(clock.now + run.publish, self._ask)

        Publication(clock, self._replicas, self._version + 1, run.transfer, published)

    def _look(self, ended: int = 0) -> None:
        """Add to the sums over time. Call this before the numbers of episodes change.

        ended: episodes that have already left their replica at this moment.
        """
        since = self._clock.now - self._counted
        if since > 0:
            self._in_flight += since * (sum(one.in_flight for one in self._replicas) + ended)
            self.buffered += since * self.buffer.complete
            self._counted = self._clock.now

    def _totals(self) -> _Totals:
        counts = [one.engine.counts for one in self._replicas]
        return _Totals(
            now=self._clock.now,
            waiting=self._waiting,
            training=self._training,
            stepping=sum(one.engine.seconds for one in self._replicas),
            paused=sum(one.paused for one in self._replicas),
            recomputed=sum(one.recomputed for one in self._replicas),
            in_flight=self._in_flight,
            calls_waiting=sum(one.waited for one in self._replicas),
            buffered=self.buffered,
            steps=sum(one.steps for one in counts),
            generated=sum(one.generated for one in counts),
        )

    def _forecast(self) -> Forecast:
        first, last, count = self._first, self._last, self._window.count
        assert first is not None and last is not None
        trained = [
            (version - (one.oldest or 0), one.plan.sizes.tokens)
            for version, batch in enumerate(self.batches)
            for one in batch
            if version >= self._window.skipped
        ]
        seconds, tokens = last.now - first.now, sum(tokens for _, tokens in trained)
        waiting, training = last.waiting - first.waiting, last.training - first.training
        all_replicas = seconds * len(self._replicas)
        paused = (last.paused - first.paused) / all_replicas
        return Forecast(
            iteration_seconds=seconds / count,
            tokens_per_second=tokens / seconds,
            batch_tokens=tokens / count,
            waiting=waiting / count,
            training=training / count,
            publishing=(seconds - waiting - training) / count,
            replica_idle=max(0.0, 1 - (last.stepping - first.stepping) / all_replicas - paused),
            replica_paused=paused,
            staleness=shares(Counter(staleness for staleness, _ in trained)),
            in_flight=(last.in_flight - first.in_flight) / all_replicas,
            calls_waiting=(last.calls_waiting - first.calls_waiting) / all_replicas,
            buffered=(last.buffered - first.buffered) / seconds,
            recomputed=(last.recomputed - first.recomputed) / count,
            durations=tuple(later - earlier for earlier, later in itertools.pairwise(self._asks)),
            running=(last.generated - first.generated) / max(1, last.steps - first.steps),
        )
