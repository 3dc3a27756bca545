"""Hubs with real connections, and scripted replicas that connect to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import Config
from megatron_stppo.data.ledger import Order, Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.wire.ends import Dialer, Listener
from megatron_stppo.replicas.wire.episodes import Done
from megatron_stppo.replicas.wire.messages import FromTrainer, Hello, Moved, Play, Ready, Receive, Trained
from tests.replicas.peers import until

TASKS = tuple(Task("test", (), ("yes",), "train", index) for index in range(12))
EXPECTED = Expected("m0", 100, "float32", "0.32.0", 64)
SIZE = 2**20


@dataclass
class ScriptedReplica:
    """A scripted replica on a real connection."""

    dialer: Dialer
    got: list[FromTrainer] = field(default_factory=list)

    def next(self, kind: type, seconds: float = 30.0):
        """Return the next message of this kind; others before it are dropped."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.got += self.dialer.take(0.05)
            while self.got:
                if isinstance(message := self.got.pop(0), kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {seconds} s")

    def given(self) -> list[int]:
        return [episode.number for episode in self.next(Play).episodes]

    def finish(self, number: int, **changed: object) -> None:
        self.dialer.send(Done(number, replace(played(number), **changed)))


def bare_learner(folder: Path, **serving: object) -> Any:
    """Return a learner, for Served, of a run in the folder. Its weights go nowhere."""
    sections = {"model": {"path": folder / "model"}, "run": {"root": folder, "name": "run"}}
    config = Config.model_validate(sections | {"serving": {"replicas": 2, **serving}})
    mesh = SimpleNamespace(layout=Layout())
    return SimpleNamespace(config=config, mesh=mesh, load_for=lambda phase: None)


def played(number: int, version: int = 0) -> Trajectory:
    turn = Turn((7, 8), (-0.5, -1.0), (), 0.0, ((version, 2),))
    return Trajectory(TASKS[0], (1 + number % 50,), (turn,), "ok")


def hello(name: str, **changed: object) -> Hello:
    fields = dict(
        name=name,
        model="m0",
        vocabulary=100,
        dtype="float32",
        vllm="0.32.0",
        tensor=1,
        capacity=8,
        process="here 1",
    )
    return Hello(**(fields | changed))


@dataclass
class Trainer:
    hub: Hub
    crew: Crew
    ledger: EpisodeLedger
    listener: Listener
    told: list[tuple[str, str]]  # groups for weights that are lost, and why

    def queues(self) -> dict[str, float]:
        return {
            name: count for name, count in self.hub.ask(Crew.numbers).items() if name.startswith("episodes_")
        }

    def join(self, replica: ScriptedReplica, name: str, **changed: object) -> str:
        """Let the replica get the version that is served, from the trainer or from another replica, which is
        left out. Return its group."""
        replica.dialer.send(hello(name, **changed))
        until(lambda: name in self.names())
        self.hub.wait(self.is_being_sent)
        message = replica.next(Receive)
        replica.dialer.send(Moved(message.route.name, message.version))
        if len(message.route.ends) == 2:
            self.gave(message)
        until(lambda: self.crew.tree.nodes[self.names()[name]].version == message.version)
        return self.names()[name]

    def names(self) -> dict[str, str]:
        """Return the groups by name."""
        with self.hub._changed:
            return {member.hello.name: group for group, member in self.crew.members.items()}

    def is_being_sent(self) -> bool | None:
        return bool(self.crew.tree._hops) or None

    def gave(self, message: Receive) -> None:
        """Report that the replica that sends has left the transfer."""
        with self.hub._changed:
            member = self.crew.members[message.route.ends[0]]
            self.crew.take(member.peer, Moved(message.route.name, message.version))

    def update(self, replica: ScriptedReplica, version: int) -> Receive:
        """Let the trainer send the announced version to a replica. It has not arrived on return."""
        replica.dialer.send(Ready(version))
        message = self.hub.wait(lambda: None)
        assert isinstance(message, Receive) and replica.next(Receive) == message
        return message


@contextmanager
def trainer(
    timeout: float = 30.0,
    staleness: int = 1,
    order: Order = "admission",
    notice: Callable[[], str] = lambda: "",
    local: LocalReplicas | None = None,
    tell_lost: Callable[[str, str], object] = lambda group, why: None,
    resample: int = 0,
    version: int = 0,
) -> Iterator[tuple[Trainer, Callable[..., ScriptedReplica]]]:
    """A hub with batches of two episodes, and a function that connects a replica, which joins if it has a
    name."""
    ledger = EpisodeLedger(TaskCursor(TASKS, 0), Terms(2, 1, staleness, order, resample=resample))
    listener = Listener("127.0.0.1", SIZE)
    told: list[tuple[str, str]] = []

    def tell(group: str, why: str) -> None:
        tell_lost(group, why)
        told.append((group, why))

    address, trained = ("127.0.0.1", 1), Trained(Layout(), "local")
    crew = Crew(listener, ledger, EXPECTED, address, trained, timeout, local, tell_lost=tell)
    hub = Hub(crew, notice)
    if version >= 0:
        hub.announce(version)
    dialers, made = [], Trainer(hub, crew, ledger, listener, told)

    def connect(name: str = "", **changed: object) -> ScriptedReplica:
        dialers.append(Dialer(listener.connection, SIZE))
        replica = ScriptedReplica(dialers[-1])
        if name:
            made.join(replica, name, **changed)
        return replica

    try:
        yield made, connect
    finally:
        hub.close("done")
        for dialer in dialers:
            dialer.close()
