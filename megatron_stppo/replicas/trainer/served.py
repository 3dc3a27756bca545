"""Rollouts from replicas: the trainer's ranks' side of asynchronous training.

The first rank exchanges messages with the replicas (hub.py). Weights are sent to one replica by all of the
trainer's ranks (Sender), in Steps that the first rank decides and broadcasts, or while training goes on;
that replica passes them on to the others (parallel/weight_tree.py).
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.errors import Abandoned, EngineLost, ToolsStayAway, TooManyFailures
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Summary, Task
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import ConfigError
from megatron_stppo.data.exchange import Played
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.observe.metrics import counting
from megatron_stppo.parallel.collectives import any_rank, broadcast_bytes, decode, encode, refused_together
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.episodes import decode_episodes, encode_episodes
from megatron_stppo.replicas.wire.measure import ServingMeter
from megatron_stppo.replicas.wire.messages import Assignment, Receive
from megatron_stppo.replicas.wire.weights import Link, LinkLost
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings
from megatron_stppo.rollout.episodes.failures import FailureLimit
from megatron_stppo.weights.reshard.execute import Packed
from megatron_stppo.weights.sharding.hf_load import load_tokenizer

ASKS = 2.0  # seconds after which a first rank that waits tells the others so


class Sender:
    """This rank's links to replicas, and the thread that sends a copy of the weights.

    Every rank calls the methods in the same order. The threads of all ranks run at the same time as training.
    They use a group of their own and the groups of the links, which have gloo only, and nothing that training
    changes: the copy is in host memory.
    """

    def __init__(self, learner: Learner, store: dist.Store, timeout: timedelta, hub: Hub | None) -> None:
        """store: on which the groups for weights are built. hub: on the first rank, None on the others."""
        self._learner, self._store, self._timeout, self._hub = learner, store, timeout, hub
        self._own = dist.new_group(backend="gloo", timeout=10 * timeout)
        self._links: dict[str, Link] = {}  # by route
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.sent = 0  # bytes

    def send(self, message: Receive, packed: Packed | None = None) -> None:
        """Send the weights that the message names to its replica, or have the hub lose the replica.

        packed: a copy of the weights; None: the policy's, which must be loaded.
        """
        route = message.route
        try:
            if (link := self._links.get(route.name)) is None:
                link = Link.from_trainer(self._learner, route, self._store, self._timeout, self._own)
                self._links[route.name] = link
            self.sent += link.sync(message.version, packed).bytes_moved
        except LinkLost as error:
            self._links.pop(route.name, None)
            if self._hub is not None:
                why = str(error)
                self._hub.ask(lambda crew: crew.expel(route.ends[0], why))

    def pack(self) -> tuple[Packed, int] | None:
        """Return a copy of what the next version sends, and to replicas of how many ranks it can be sent.

        None if no replica has got a version yet.
        """
        for link in self._links.values():
            if (packed := link.pack()) is not None:
                return packed, link.route.tensor
        return None

    def begin(self, packed: Packed, tensor: int) -> None:
        """Start to send a copy to the first replica that the hub names. Arguments as `pack` returns them."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(
            target=self._run, args=(packed, tensor, device), name="sender", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def stale(self, routes: Collection[str]) -> list[str]:
        """Return the routes of this rank's links that are not among these."""
        return [name for name in self._links if name not in routes]

    def close(self, routes: Collection[str] | None = None) -> None:
        """Close these links; None: all."""
        for name in list(self._links if routes is None else routes):
            if (link := self._links.pop(name, None)) is not None:
                link.close()

    def _run(self, packed: Packed, tensor: int, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread has the first one
            while True:
                message = self._hub.next_to_send(ASKS, tensor) if self._hub is not None else False
                message = decode(broadcast_bytes(encode(message), 0, self._own), bool | Receive)
                if isinstance(message, Receive):
                    self.send(message, packed)
                elif not message:
                    return
        except Exception as error:  # raised by `join`, in the main thread
            self._error = error
            if self._hub is not None:  # the main thread may be waiting
                self._hub.fail(error)


T = TypeVar("T")


class Step(msgspec.Struct, frozen=True):
    """What all ranks of the trainer do next.

    send: send the weights of the message. ask: tell whether this rank has a notice. done: continue. A name of
    RAISED: raise this error with `text`.
    """

    kind: str
    message: Receive | None = None
    text: str = ""
    closed: tuple[str, ...] = ()  # routes to replicas that are lost: close their links


# `wait` returns after ASKS seconds without a replica that serves, or in an evaluation: then the first rank
# asks the others whether the run must end. A rank that waits for its decision handles no signal, and cannot
# tell by itself.
RECORDS = 10.0  # seconds that a checkpoint waits for the records of episodes in progress, at most
RAISED = {error.__name__: error for error in (ConfigError, ToolsStayAway, EngineLost, Abandoned)}


class Served:
    """The Rollouts (rollouts.py) of an asynchronous run."""

    def __init__(
        self, learner: Learner, store: dist.Store, hub: Hub | None, notice: Callable[[], str] = lambda: ""
    ) -> None:
        """store: the one on which the groups for weights are built. Collective.

        hub: on the first rank, None on the others. notice: returns why this rank must end soon, or "".
        """
        self.learner, self._hub, self._notice = learner, hub, notice
        self._meter, config = ServingMeter(), learner.config
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            config.model.path, config.model.template_arguments
        )
        self._failures = FailureLimit(config.environment.max_failure_rate)
        self._sender = Sender(learner, store, timedelta(seconds=config.serving.timeout), hub)
        self._version = -1
        self._evaluated = 0  # episodes of evaluations

    def publish(self, version: int) -> None:
        """Begin to send the weights to all replicas. At first, wait until as many as configured have joined.

        It waits until all replicas have the version before, and copies the weights: they are sent while the
        next iteration begins. An episode that is admitted from now on begins with this version. With
        serving.update=complete, it also waits until all admitted episodes have finished.
        """
        if version == self._version:
            return
        self.learner.load_for("reshard")
        first, self._version = self._version < 0, version
        if first:
            return self._start()
        started = time.perf_counter()
        self._sender.join()
        self._meter.waited += time.perf_counter() - started
        self._until(Hub.is_spread)
        if self.learner.config.serving.update == "complete":
            self._until(Hub.settled)
        packed = self._sender.pack()
        if self._hub is not None:
            self._hub.announce(version, apart=packed is not None)
        if packed is not None:
            self._sender.begin(*packed)
        else:  # the replicas that the trainer has sent weights to are lost
            self._until(lambda hub: hub.serves(version))

    def draw(self, iteration: int) -> Played:
        if self._hub is not None:
            self._hub.admit(iteration)
        played = Played.of(self._until(Hub.batch) or [])
        config = self.learner.config
        if config.rollout.resample:
            dropped = encode(self._hub.ledger.dropped) if self._hub is not None else None
            played = replace(played, dropped=decode(broadcast_bytes(dropped, 0), list[Summary]))
        try:
            self._failures.check(played.with_dropped, played.own)
        except TooManyFailures:
            if self._hub is not None:
                self._hub.ask(lambda crew: crew.ledger.put_back())  # for the checkpoint
            raise
        return played

    def play(
        self,
        tasks: Sequence[Task],
        samples: int,
        settings: RolloutSettings,
        seed: int,
        progress: Progress | None = None,
    ) -> Played:
        """Play the episodes of an evaluation. No replica is updated before they have ended.

        progress: not reported. Raises Abandoned.
        """
        count = len(tasks) * samples
        numbers = [-self._evaluated - i for i in range(1, count + 1)]
        self._evaluated += count
        if self._hub is not None:
            self._hub.evaluate(
                Assignment(
                    number, tasks[i // samples], i // samples, seed, i, settings.temperature, settings.top_p
                )
                for i, number in enumerate(numbers)
            )
        played = Played.of(self._until(lambda hub: hub.results(numbers), abandons=True) or [])
        self._failures.check(played.every, played.own)
        return played

    def load_for(self, phase: Phase) -> None:
        self.learner.load_for(phase)

    def state(self) -> dict[str, Any]:
        """Return the ledger's state on the first rank, which writes it, and nothing on the others."""
        return self._hub.ask(lambda crew: crew.ledger.state()) if self._hub is not None else {}

    def episodes(self) -> bytes:
        if self._hub is None:
            return b""
        if not self.learner.config.replays_rollout:  # experts of recorded tokens are not recorded
            self._hub.record(RECORDS)
        return encode_episodes(*self._hub.kept())

    def restore(self, state: Mapping[str, Any], episodes: Callable[[], bytes]) -> None:
        """Restore the ledger on the first rank. Raises ConfigError on all ranks, also for episodes that
        cannot be read, perhaps because another version of this program wrote them."""
        with refused_together():
            if self._hub is None:
                return
            try:
                finished, unfinished = decode_episodes(episodes())
                self._hub.ledger.restore(state, finished)
                self._hub.recall(unfinished)
            except ConfigError:
                raise
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"the checkpoint's episodes cannot be read ({one_line(str(error))}); resume from another"
                ) from error

    def measure(self) -> dict[str, Any]:
        self._meter.sent, self._sender.sent = self._sender.sent, 0
        row = {}
        if self._hub is not None:
            row = self._meter.row(self._hub.ask(Crew.counters), self._hub.ask(Crew.numbers))
        return dict(decode(broadcast_bytes(encode(row), 0), dict[str, float]))

    def close(self) -> None:
        try:
            if self._hub is not None:
                self._hub.end_transfers()
            self._sender.join()
        finally:
            if self._hub is not None:
                self._hub.close("the run has ended")
                keys.remove(self.learner.config.run.folder)
        self._sender.close()
        process.stop()

    def _start(self) -> None:
        """Wait until the configured replicas have joined."""
        wanted = self.learner.config.serving.replicas or 0
        if self._hub is not None:
            self._hub.announce(self._version)
        with counting("waiting for replicas", self._hub is not None) as show:
            self._until(lambda hub: hub.all_serve(wanted, show))
        if self._hub is not None:
            self._meter.start(self._hub.ask(Crew.counters))

    def _until(self, result: Callable[[Hub], T | None], abandons: bool = False) -> T | None:
        """Return result(hub) as soon as it is not None; None on other ranks. Replicas may join meanwhile.

        abandons: raise Abandoned as soon as any rank has received notice.
        """
        answers: list[T] = []

        def decide(hub: Hub) -> Step:
            if (answer := hub.wait(lambda: result(hub), ASKS, self._version, abandons)) is None:
                return Step("ask")
            if isinstance(answer, Receive):
                return Step("send", answer)
            answers.append(answer)
            return Step("done")

        while (step := self._next(decide)).kind != "done":
            if step.message is not None:
                self.learner.load_for("reshard")
                self._sender.join()
                self._sender.send(step.message)
            elif any_rank(bool(self._notice())) and self._hub is not None:
                self._hub.must_end("another rank received notice")
        return answers[0] if answers else None

    def _next(self, decide: Callable[[Hub], Step]) -> Step:
        """Return the first rank's decision on all ranks, or raise its error on all. Collective.

        The time counts as a wait of the trainer. Links of replicas that the hub has lost are closed.
        """
        step, started = Step("done"), time.perf_counter()
        if self._hub is not None:
            try:
                step = decide(self._hub)
            except tuple(RAISED.values()) as error:
                step = Step(type(error).__name__, text=str(error))
            usable = self._hub.ask(lambda crew: crew.tree.routes())
            lost = () if self._hub.sends_apart else self._sender.stale(usable)
            step = msgspec.structs.replace(step, closed=tuple(lost))
        step = decode(broadcast_bytes(encode(step), 0), Step)
        self._sender.close(step.closed)
        self._meter.waited += time.perf_counter() - started
        if step.kind in RAISED:
            raise RAISED[step.kind](step.text)
        return step
