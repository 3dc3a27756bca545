"""Replicas in simulated time: their episodes, calls of tools, and updates of the weights."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron_stppo.parallel.weight_tree import PATIENCE, TRAINER, Hop, Node, WeightTree
from megatron_stppo.plan.simulation.engine import Clock, EngineSpeed, Generation, StepEngine
from megatron_stppo.plan.simulation.workload import PlannedEpisode

UpdateKind = Literal["recompute", "drain", "complete"]


@dataclass
class EpisodeInPlay:
    """An episode in progress, or a complete one."""

    number: int
    plan: PlannedEpisode
    turn: int = 0  # turns that are complete
    context: int = 0  # tokens so far
    cached: int = 0  # of these, tokens whose keys and values the engine holds
    weights: int = -1  # updates of the replica when they were computed
    oldest: int | None = None  # version of the first generated token


class ReplicaModel:
    """Plays episodes with one engine.

    overlap: generate while tools are called. Otherwise no step begins before all calls are answered.
    """

    def __init__(
        self,
        clock: Clock,
        speed: EngineSpeed,
        calls: int,
        ended: Callable[[EpisodeInPlay], None],
        update: UpdateKind = "recompute",
        overlap: bool = True,
    ) -> None:
        """calls: calls of tools in progress at a time. ended: called with every complete episode."""
        self.engine = StepEngine(clock, speed)
        self.version = 0
        self.in_flight = 0  # episodes
        self.paused = 0.0  # seconds without steps because of updates
        self.recomputed = 0  # tokens computed again because of updates
        self.waited = 0.0  # seconds that calls of tools waited for a place
        self._clock, self._calls, self._ended, self._update = clock, calls, ended, update
        self._overlap = overlap
        self._updates = 0
        self._calling = 0
        self._asked: deque[tuple[float, float, Callable[[], None]]] = deque()  # calls that wait for a place
        self._generating = 0  # turns in the engine
        self._ready: Callable[[], None] | None = None  # with drain: called when no turn is in the engine
        self._draining = False
        self._held: list[EpisodeInPlay] = []  # with drain: turns that wait for the update
        self._early: list[EpisodeInPlay] = []  # episodes that wait for the update
        self._since = 0.0  # start of a pause

    def admit(self, episode: EpisodeInPlay, version: int) -> None:
        """Begin an episode as soon as the replica has the version."""
        self.in_flight += 1
        if self.version < version:
            self._early.append(episode)
        else:
            self._turn(episode)

    def announce(self, ready: Callable[[], None]) -> None:
        """Prepare for an update. Call `ready` when it may begin: at once, or when running turns are over."""
        if self._update != "drain":
            ready()
            return
        self._draining, self._ready = True, ready
        self._look_whether_drained()

    def pause(self, stopped: Callable[[], None]) -> None:
        """Call `stopped` at the next end of a step. The engine does not step until `update` or `go_on`."""

        def stop() -> None:
            self._since = self._clock.now
            stopped()

        self.engine.stop(stop)

    def go_on(self) -> None:
        """Continue with the same weights."""
        self.paused += self._clock.now - self._since
        self.engine.go_on()

    def update(self, version: int) -> None:
        """Continue with new weights."""
        self.paused += self._clock.now - self._since
        self.version, self._updates = version, self._updates + 1
        self.recomputed += self.engine.resume()
        begin = [*self._held, *self._early]
        self._draining, self._held, self._early = False, [], []
        for episode in begin:
            self._turn(episode)

    def _turn(self, episode: EpisodeInPlay) -> None:
        """Begin the next turn of an episode."""
        if self._draining:
            self._held.append(episode)
            return
        read, generated = episode.plan.sizes.turns[episode.turn]
        if episode.weights != self._updates:
            self.recomputed += episode.cached
            episode.cached = 0
        episode.context += read
        fresh = episode.context - episode.cached
        self._generating += 1
        self.engine.add(
            Generation(
                episode.context,
                fresh,
                generated,
                partial(self._finished, episode),
                partial(self._begun, episode),
            )
        )

    def _begun(self, episode: EpisodeInPlay) -> None:
        if episode.oldest is None:
            episode.oldest = self.version

    def _finished(self, episode: EpisodeInPlay) -> None:
        """Continue after a turn: call the tool, or end the episode."""
        self._generating -= 1
        _, generated = episode.plan.sizes.turns[episode.turn]
        episode.context += generated
        # the last token is read by the next turn
        episode.cached, episode.weights = episode.context - 1, self._updates
        episode.turn += 1
        if episode.turn < len(episode.plan.sizes.turns):
            self._call(episode.plan.waits[episode.turn - 1], partial(self._turn, episode))
        else:
            self.in_flight -= 1
            self._ended(episode)
        self._look_whether_drained()

    def _look_whether_drained(self) -> None:
        if self._draining and not self._generating and self._ready is not None:
            ready, self._ready = self._ready, None
            ready()

    def _call(self, seconds: float, answer: Callable[[], None]) -> None:
        """Call a tool that takes `seconds`, and `answer` when it is done."""
        if seconds <= 0:
            answer()
            return
        self._asked.append((self._clock.now, seconds, answer))
        self.engine.blocked = not self._overlap
        self._begin_calls()

    def _begin_calls(self) -> None:
        while self._asked and self._calling < self._calls:
            asked, seconds, answer = self._asked.popleft()
            self.waited += self._clock.now - asked
            self._calling += 1
            self._clock.at(self._clock.now + seconds, partial(self._answered, answer))

    def _answered(self, answer: Callable[[], None]) -> None:
        self._calling -= 1
        self._begin_calls()
        if not self._calling and self.engine.blocked:
            self.engine.blocked = False
            self.engine.wake()
        answer()


class Publication:
    """Sends versions to all replicas by the rules of a run (parallel/weight_tree.py): the trainer to one,
    which passes them on. Both ends of a transfer between replicas pause."""

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[ReplicaModel],
        first: float,
        transfer: float,
        over: Callable[[], None],
    ) -> None:
        """first: seconds from the trainer to a replica. transfer: seconds from one replica to another. over:
        called when all replicas have the version."""
        self._clock, self._first, self._transfer, self._over = clock, first, transfer, over
        self._replicas = {str(number): replica for number, replica in enumerate(replicas)}
        self._tree = WeightTree(lambda: clock.now)
        for name in self._replicas:
            self._tree.nodes[name] = Node(1, version=0, has_joined=True)
        self._tree.begin(0)

    @property
    def is_over(self) -> bool:
        return all(node.version == self._tree.version for node in self._tree.nodes.values())

    def begin(self, version: int) -> None:
        self._tree.begin(version)
        for name, replica in self._replicas.items():
            replica.announce(partial(self._is_ready, name))

    def _is_ready(self, name: str) -> None:
        self._tree.nodes[name].ready = self._tree.version
        self._look()

    def _look(self) -> None:
        if (first := self._tree.first()) is not None:
            self._start(first, self._first)
        for hop in self._tree.hops():
            self._start(hop, self._transfer)
        if not self.is_over:  # a pair may be connected if nothing else moves
            self._clock.at(self._clock.now + 1.01 * PATIENCE, self._look_again)

    def _look_again(self) -> None:
        if not self.is_over and not self._tree.is_moving:
            self._look()

    def _start(self, hop: Hop, seconds: float) -> None:
        ends = [self._replicas[name] for name in (hop.source, hop.target) if name != TRAINER]
        waiting = len(ends)

        def stopped() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._clock.at(self._clock.now + seconds, partial(self._sent, hop))

        for end in ends:
            end.pause(stopped)

    def _sent(self, hop: Hop) -> None:
        self._replicas[hop.target].update(hop.version)
        self._tree.ended(hop.route, hop.target)
        if hop.source != TRAINER:
            self._replicas[hop.source].go_on()
            self._tree.ended(hop.route, hop.source)
        if self.is_over:
            self._over()
        else:
            self._look()
