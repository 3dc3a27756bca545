"""A trainer of one rank that follows a script: it accepts a replica, assigns episodes and sends weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors.torch import load_file

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.cluster.launch.rendezvous import host_store
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.ends import Listener
from megatron_stppo.replicas.wire.messages import (
    MOST_BYTES,
    Announce,
    Assignment,
    Done,
    FromTrainer,
    Hello,
    Moved,
    Play,
    Ready,
    Receive,
    Route,
    Stop,
    Trained,
)
from megatron_stppo.replicas.wire.weights import Link, tell_lost
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.spans import row_widths, training_layouts
from tests.weights.reshard.pieces import cut

PATIENCE = 60.0  # seconds for a message
Kind = TypeVar("Kind")


class Scripted:
    """Version v of its weights is the checkpoint, multiplied by 1 + v / 50."""

    def __init__(self, run: Path, model: Path) -> None:
        self.listener = Listener("127.0.0.1", MOST_BYTES)
        keys.write(run, self.listener.connection)
        self._timeout = timedelta(seconds=PATIENCE)
        self._store, self._port = host_store("127.0.0.1", self._timeout)
        self._shape, self._links = read_shape(model), 0
        spans = training_layouts(self._shape, Layout())[0]
        self._source = cut(spans, load_file(model / "model.safetensors"), row_widths(self._shape))
        self._base = {name: tensor.clone() for name, tensor in self._source.items()}
        self._messages: list[Any] = []
        self.done: dict[int, Trajectory] = {}

    def join(self, version: int) -> Hello:
        """Accept the next replica, and send it the version."""
        self._messages, self.done = [], {}
        hello = self.expect(Hello)
        self._links += 1
        name, source = f"link-{self._links}", Trained(Layout(), "local")
        self._route = Route(name, "127.0.0.1", self._port, source, hello.tensor, (f"member-{self._links}",))
        self.send(Receive(self._route, version))
        self._link = Link(self._source, self._shape, self._route, False, self._store, self._timeout)
        self._send_weights(version)
        return hello

    def play(self, numbers: Sequence[int], tasks: Sequence[Task], seed: int) -> None:
        """Assign the tasks; the first number is place 0 of the rollout."""
        given = [
            Assignment(number, task, number, seed, place, 1.0, 1.0)
            for place, (number, task) in enumerate(zip(numbers, tasks, strict=True))
        ]
        self.send(Play(tuple(given)))

    def update(self, version: int) -> None:
        self.send(Announce(version))
        assert self.expect(Ready) == Ready(version)
        self.send(Receive(self._route, version))
        self._send_weights(version)

    def update_twice(self, version: int) -> Moved:
        """Send a version over a route whose sender is lost, and then over another one."""
        self.send(Announce(version))
        assert self.expect(Ready) == Ready(version)
        broken = msgspec.structs.replace(self._route, name=f"broken-{version}", ends=("member-x",))
        tell_lost(self._store, "member-x", "its process ended")
        self.send(Receive(broken, version))
        failed = self.expect(Moved)
        self.send(Receive(self._route, version))
        self._send_weights(version)
        return failed

    def wait_for(self, count: int) -> dict[int, Trajectory]:
        """Return the trajectories of the replica's episodes, as soon as `count` have ended."""
        while len(self.done) < count:
            message = self.expect(Done)
            self.done[message.number] = message.trajectory
        return self.done

    def send(self, message: FromTrainer) -> None:
        assert self.listener.send(self._peer, message)

    def stop(self) -> None:
        self.send(Stop("the script has ended"))
        self._link.close()

    def expect(self, kind: Callable[..., Kind]) -> Kind:
        """Return the replica's next message of this kind; others wait for their turn."""
        ends = time.monotonic() + PATIENCE
        while True:
            for message in self._messages:
                if isinstance(message, kind):  # type: ignore[arg-type]
                    self._messages.remove(message)
                    return message  # type: ignore[no-any-return]
            assert time.monotonic() < ends, f"no {kind} but {self._messages}"
            for peer, message in self.listener.take(1.0):
                if isinstance(message, Hello):
                    self._peer = peer
                if peer == self._peer:
                    self._messages.append(message)

    def _send_weights(self, version: int) -> None:
        for name, tensor in self._source.items():
            tensor.copy_(self._base[name] * (1 + version / 50))
        self._link.sync(version)
        assert self.expect(Moved) == Moved(self._route.name, version)
