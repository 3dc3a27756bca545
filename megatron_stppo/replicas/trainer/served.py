"""Rollouts from replicas: the trainer's ranks' side of asynchronous training.

The first rank exchanges messages with the replicas (hub.py). Weights are sent to a replica by all of the
trainer's ranks, in Steps that the first rank decides and broadcasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.errors import EngineLost, ToolsStayAway, TooManyFailures
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Summary, Task
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import ConfigError
from megatron_stppo.data.exchange import Played
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.observe.metrics import counting
from megatron_stppo.parallel.collectives import any_rank, broadcast_bytes, decode, encode
from megatron_stppo.parallel.raise_together import raise_together
from megatron_stppo.replicas.trainer import recorded
from megatron_stppo.replicas.trainer.crew import Member
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.trainer.measure import ServingMeter
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.messages import Assignment, Offer, decode_episodes, encode_episodes
from megatron_stppo.replicas.wire.weights import Link, ReplicaLost
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings
from megatron_stppo.rollout.episodes.failures import FailureLimit
from megatron_stppo.weights.sharding.hf_load import load_tokenizer

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True):
    """What all ranks of the trainer do next.

    join: build the group of `offer` with a replica of `tensor` ranks, and send the version. update: send the
    version to the replica of `group`. ask: tell whether this rank has a notice. done: continue. A name of
    RAISED: raise this error with `text`.
    """

    kind: str
    group: str = ""
    tensor: int = 0
    offer: Offer | None = None
    text: str = ""
    closed: tuple[str, ...] = ()  # groups of replicas that are lost: close their links


# Seconds without a replica that serves, after which the first rank asks the others whether the run must end.
# A rank that waits for the first one's decision handles no signal, and cannot tell by itself.
ASKS = 2.0
RAISED = {error.__name__: error for error in (ConfigError, ToolsStayAway, EngineLost)}


class Served:
    """The Rollouts (rollouts.py) of an asynchronous run."""

    def __init__(
        self,
        learner: Learner,
        store: dist.Store,
        address: tuple[str, int],
        hub: Hub | None,
        notice: Callable[[], str] = lambda: "",
    ) -> None:
        """store, address: the store on which the groups for weights are built, and its host and port.

        hub: on the first rank, None on the others. notice: returns why this rank must end soon, or "".
        """
        self.learner, self._store, self._address, self._hub = learner, store, address, hub
        self._notice = notice
        self._meter = ServingMeter()
        config = learner.config
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            config.model.path, config.model.template_arguments
        )
        self._failures = FailureLimit(config.environment.max_failure_rate)
        self._links: dict[str, Link] = {}  # by group
        self._timeout = timedelta(seconds=config.serving.timeout)
        self._version = -1
        self._evaluated = 0  # episodes of evaluations

    def publish(self, version: int) -> None:
        """Send the weights to all replicas. At first, wait until as many as configured have joined.

        With serving.update=complete, wait until all admitted episodes have finished. A replica that joins
        meanwhile gets the new version, and episodes only if none with the old version is left.
        """
        if version == self._version:
            return
        self.learner.load_for("reshard")
        first, self._version = self._version < 0, version
        if first:
            return self._start()
        if self.learner.config.serving.update == "complete":
            self._until(lambda hub: hub.settled())
        if self._hub is not None:
            self._hub.announce(version)
        while (step := self._next(self._update)).kind != "done":
            self._send(step.group)

    def draw(self, iteration: int) -> Played:
        if self._hub is not None:
            self._hub.admit(iteration)
        played = Played.of(self._until(lambda hub: hub.batch()) or [])
        config = self.learner.config
        if config.rollout.resample:
            dropped = encode(self._hub.ledger.dropped) if self._hub is not None else None
            played = replace(played, dropped=decode(broadcast_bytes(dropped, 0), list[Summary]))
        try:
            self._failures.check(played.with_dropped)
        except TooManyFailures:
            if self._hub is not None:
                self._hub.put_back()
            raise
        if self._hub is not None:
            recorded.write_batch(config.run.folder, iteration, self._hub.ledger.taken)
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

        progress: not reported.
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
        played = Played.of(self._until(lambda hub: hub.results(numbers)) or [])
        self._failures.check(played.every)
        return played

    def load_for(self, phase: Phase) -> None:
        self.learner.load_for(phase)

    def state(self) -> dict[str, Any]:
        """Return the ledger's state on the first rank, which writes it, and nothing on the others."""
        return self._hub.state() if self._hub is not None else {}

    def episodes(self) -> bytes:
        return encode_episodes(self._hub.kept()) if self._hub is not None else b""

    def restore(self, state: Mapping[str, Any], episodes: Callable[[], bytes]) -> None:
        """Restore the ledger on the first rank. Raises ConfigError on all ranks, also for episodes that
        cannot be read, perhaps because another version of this program wrote them."""
        misuse: str | None = None
        if self._hub is not None:
            try:
                self._hub.ledger.restore(state, decode_episodes(episodes()))
            except ConfigError as error:
                misuse = str(error)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                misuse = (
                    f"the checkpoint's episodes cannot be read ({one_line(str(error))}); resume from another"
                )
        raise_together(misuse, lambda failures: ConfigError(failures[0]), str)

    def measure(self) -> dict[str, Any]:
        row = self._meter.row(self._hub) if self._hub is not None else {}
        return dict(decode(broadcast_bytes(encode(row), 0), dict[str, float]))

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        if self._hub is not None:
            self._hub.close("the run has ended")
            keys.remove(self.learner.config.run.folder)
        process.stop()

    def _start(self) -> None:
        """Wait until the configured replicas have joined."""
        wanted = self.learner.config.serving.replicas or 0
        with counting("waiting for replicas", self._hub is not None) as show:
            self._until(lambda hub: hub.all_serve(wanted, show))
        if self._hub is not None:
            self._meter.start(self._hub.counters())

    def _until(self, result: Callable[[Hub], T | None]) -> T | None:
        """Return result(hub) as soon as it is not None; None on other ranks. Replicas may join meanwhile."""
        found: list[T] = []

        def decide(hub: Hub) -> Step:
            if (answer := hub.wait(lambda: result(hub), ASKS)) is None:
                return Step("ask")
            if isinstance(answer, Member):
                host, port = self._address
                spec = layer_spec(self.learner.config)
                offer = Offer(answer.group, host, port, self.learner.mesh.layout, spec, self._version)
                hub.offer(offer)
                return Step("join", answer.group, answer.hello.tensor, offer)
            found.append(answer)
            return Step("done")

        while (step := self._next(decide)).kind != "done":
            if step.kind == "join":
                self._join(step)
            elif any_rank(bool(self._notice())) and self._hub is not None:
                self._hub.must_end("another rank received notice")
        return found[0] if found else None

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
            lost = set(self._links) - self._hub.groups() - {step.group}
            step = msgspec.structs.replace(step, closed=tuple(sorted(lost)))
        step = decode(broadcast_bytes(encode(step), 0), Step)
        for group in step.closed:
            self._links.pop(group).close()
        self._meter.waited += time.perf_counter() - started
        if step.kind in RAISED:
            raise RAISED[step.kind](step.text)
        return step

    def _update(self, hub: Hub) -> Step:
        group = hub.next_update(self._version)
        return Step("update", group) if group else Step("done")

    def _join(self, step: Step) -> None:
        """Build the group with a replica, and send the version that is served."""
        assert step.offer is not None
        self.learner.load_for("reshard")
        try:
            link = Link.from_trainer(self.learner, step.offer, step.tensor, self._store, self._timeout)
        except ReplicaLost as error:
            return self._lose(step.group, str(error))
        self._links[step.group] = link
        self._send(step.group)
        if self._hub is not None:
            self._hub.joined_now(step.group)

    def _send(self, group: str) -> None:
        try:
            report = self._links[group].sync(self._version)
        except ReplicaLost as error:
            return self._lose(group, str(error))
        self._meter.sent += report.bytes_moved

    def _lose(self, group: str, why: str) -> None:
        if (link := self._links.pop(group, None)) is not None:
            link.close()
        if self._hub is not None:
            self._hub.lose(group, why)
