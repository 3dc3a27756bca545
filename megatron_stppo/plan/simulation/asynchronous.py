"""Simulate training: a trainer, and replicas that play episodes while it trains.

This follows docs/asynchronous.md. In iteration v the trainer requests batch v and waits until it is complete.
Then it computes scores, advantages and updates, waits until all replicas have version v, and begins to send
version v + 1 to one of them, which passes it on while the next iteration begins. Admitted episodes are given
to the replica with the fewest episodes in progress, and begin with the newest version.

Colocated training is the case in which no episode begins before the update: with staleness 0, and with the
time to move models and engines in and out of GPU memory as `publish`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from megatron_stppo.data.ledger import Ledger, Terms
from megatron_stppo.plan.simulation.engine import Clock, EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.replica import EpisodeInPlay, Publication, ReplicaModel, UpdateKind
from megatron_stppo.plan.simulation.workload import Workload


@dataclass(frozen=True)
class AsynchronousRun:
    """What is simulated. Seconds are those of the machine that is planned for."""

    work: Workload
    terms: Terms
    engine: EngineSpeed  # of each replica
    trainer: TrainerSpeed
    replicas: int = 1
    concurrency: int = 256  # episodes in progress per replica
    update: UpdateKind = "recompute"
    first: float = 0.0  # seconds to send the weights from the trainer to a replica
    transfer: float = 0.0  # seconds to send them from one replica to another
    publish: float = 0.0  # seconds of the trainer for each version, before it is sent
    overlap: bool = True  # rollout.overlap_tools


@dataclass(frozen=True)
class Window:
    """The iterations that are measured: `count` of them, after the first `skipped`."""

    skipped: int = 4
    count: int = 12


@dataclass(frozen=True)
class Forecast:
    """Means over the measured iterations, in simulated time. Seconds are per iteration.

    The shares of a role do not sum to 1: the rest is work.
    """

    iteration_seconds: float
    tokens_per_second: float  # tokens of the trajectories that are trained on, prompts included
    waiting: float  # seconds that the trainer waits for a complete batch or, with `complete`, all episodes
    training: float  # seconds of score, advantage and update
    publishing: float  # the other seconds, for the weights
    replica_idle: float  # share of time without a sequence to run, mean over replicas
    replica_paused: float  # share of time that replicas wait for weights, mean over replicas
    staleness: Mapping[int, float]  # {versions: share of the trajectories}
    calls_waiting: float  # calls of tools that wait for a place (environment.concurrency), per replica
    recomputed: float  # tokens per iteration whose keys and values are computed again because of updates
    running: float  # sequences per engine step

    @property
    def staleness_mean(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


def simulate(run: AsynchronousRun, window: Window | None = None) -> Forecast:
    """Return the forecast of asynchronous training.

    The first iterations are left out by default: they begin with empty replicas.
    """
    window = window or Window(4 + 2 * run.terms.max_staleness)
    return AsynchronousSimulation(run, window).run()


@dataclass(frozen=True)
class _Totals:
    """Sums over the trainer and all replicas, from the start of the simulation to one moment."""

    now: float
    waiting: float
    training: float
    stepping: float
    paused: float
    recomputed: float
    calls_waiting: float  # calls of tools times seconds
    steps: int
    generated: int

    def since(self, earlier: _Totals) -> _Totals:
        return _Totals(*(late - early for late, early in zip(astuple(self), astuple(earlier), strict=True)))


class AsynchronousSimulation:
    """A run in simulated time.

    ledger: that of every run (data/ledger.py). batches: those that were trained on, from iteration 0.
    """

    def __init__(self, run: AsynchronousRun, window: Window) -> None:
        self._run, self._window = run, window
        self._clock = Clock()
        self.ledger = Ledger(run.terms)
        self._admitted: deque[EpisodeInPlay] = deque()  # and not begun
        self._ended_of: dict[int, list[EpisodeInPlay]] = {}  # by open group
        settings = (run.engine, run.work.tools.at_once, self._ended, run.update, run.overlap)
        self._replicas = [ReplicaModel(self._clock, *settings) for _ in range(run.replicas)]
        self._publication = Publication(self._clock, self._replicas, run.first, run.transfer, self._publish)
        self._version = -1
        self._asked_at: float | None = None  # while the trainer waits
        self._trained_at: float | None = None  # while the version waits for episodes before it is published
        self._waiting = self._training = 0.0
        self.batches: list[tuple[EpisodeInPlay, ...]] = []
        self._measured: list[_Totals] = []  # when the measured iterations began, and when the last one ended

    def run(self) -> Forecast:
        self._ask()
        self._clock.run(lambda: len(self._measured) > self._window.count)
        return self._forecast()

    def _ask(self) -> None:
        """Begin the next iteration: admit episodes, and ask for a batch."""
        self._version += 1
        if self._version >= self._window.skipped:
            self._measured.append(self._totals())
        if self._version == self._window.skipped + self._window.count:
            return
        self._asked_at = self._clock.now
        samples = self._run.terms.samples
        for group, *_ in self.ledger.admit(self._version):
            self._ended_of[group] = []
            numbers = range(group * samples, (group + 1) * samples)
            self._admitted.extend(EpisodeInPlay(number, self._run.work.episode(number)) for number in numbers)
        self._begin()
        self._take()

    def _begin(self) -> None:
        """Give admitted episodes to the replicas that have places for them."""
        while self._admitted:
            replica = min(self._replicas, key=lambda replica: replica.in_flight)
            if replica.in_flight >= self._run.concurrency:
                break
            replica.admit(self._admitted.popleft(), self._version)

    def _ended(self, episode: EpisodeInPlay) -> None:
        group = episode.number // self._run.terms.samples
        self._ended_of[group].append(episode)
        if len(self._ended_of[group]) == self._run.terms.samples:
            self.ledger.complete(group)
        self._begin()
        self._take()
        self._publish()

    def _take(self) -> None:
        """Train if the trainer waits and its batch is complete."""
        if self._asked_at is None or (taken := self.ledger.take()) is None:
            return
        ended = (self._ended_of.pop(group) for group in taken.groups)
        batch = [episode for of_group in ended for episode in sorted(of_group, key=lambda e: e.number)]
        self._waiting += self._clock.now - self._asked_at
        self._asked_at = None
        self.batches.append(tuple(batch))
        seconds = self._run.trainer.seconds(sum(episode.plan.sizes.tokens for episode in batch))
        self._training += seconds
        self._clock.at(self._clock.now + seconds, self._trained)

    def _trained(self) -> None:
        self._trained_at = self._clock.now
        self._publish()

    def _publish(self) -> None:
        """Begin to send a new version, and the next iteration. Nothing happens if there is none, if a replica
        has not got the version before, or if episodes must end first."""
        run, clock = self._run, self._clock
        completes = run.update == "complete" and any(replica.in_flight for replica in self._replicas)
        if self._trained_at is None or completes or not self._publication.is_over:
            return
        self._waiting += clock.now - self._trained_at
        self._trained_at = None

        def copied() -> None:
            self._publication.begin(self._version + 1)
            self._ask()

        clock.at(clock.now + run.publish, copied)

    def _totals(self) -> _Totals:
        engines = [replica.engine for replica in self._replicas]
        return _Totals(
            now=self._clock.now,
            waiting=self._waiting,
            training=self._training,
            stepping=sum(engine.seconds for engine in engines),
            paused=sum(replica.paused for replica in self._replicas),
            recomputed=sum(replica.recomputed for replica in self._replicas),
            calls_waiting=sum(replica.waited for replica in self._replicas),
            steps=sum(engine.steps for engine in engines),
            generated=sum(engine.generated for engine in engines),
        )

    def _forecast(self) -> Forecast:
        count, spent = self._window.count, self._measured[-1].since(self._measured[0])
        trained = [
            (version - (episode.oldest or 0), episode.plan.sizes.tokens)
            for version, batch in enumerate(self.batches)
            for episode in batch
            if version >= self._window.skipped
        ]
        versions, seconds = Counter(age for age, _ in trained), spent.now
        all_replicas = seconds * len(self._replicas)
        return Forecast(
            iteration_seconds=seconds / count,
            tokens_per_second=sum(tokens for _, tokens in trained) / seconds,
            waiting=spent.waiting / count,
            training=spent.training / count,
            publishing=max(0.0, seconds - spent.waiting - spent.training) / count,
            replica_idle=max(0.0, 1 - (spent.stepping + spent.paused) / all_replicas),
            replica_paused=spent.paused / all_replicas,
            staleness={age: versions[age] / len(trained) for age in sorted(versions)},
            calls_waiting=spent.calls_waiting / all_replicas,
            recomputed=spent.recomputed / count,
            running=spent.generated / max(1, spent.steps),
        )
