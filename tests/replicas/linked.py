"""A trainer and replicas that exchange plain tensors over links, and replicas that die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_stppo.cluster.launch.rendezvous import connect_store, host_store
from megatron_stppo.parallel.collectives import all_gather_bytes, broadcast_bytes
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.wire.messages import Route, Trained
from megatron_stppo.replicas.wire.weights import Link, LinkLost, layouts_of, tell_lost
from megatron_stppo.weights.sharding.spans import row_widths
from tests.replicas.two_programs import await_note, post
from tests.weights.reshard.pieces import blank, checkpoint, cut, model_shape, padding_rows

SHAPE = model_shape(vocab=540_000)  # 35 MB in float32, so that one replica rank gets three buckets
TIMEOUT = timedelta(seconds=60)
ABSENT = timedelta(seconds=2)
KILLED = ("before", "between", "inside")  # when a replica is killed: before the link, between syncs, in one
FAILING = (*KILLED, "silent", "changed", "other version")
EMBEDDING = "model.embed_tokens.weight"


class Trainer:
    """One rank of a trainer with the checkpoint's rows, which it can change."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout, self.rank = folder, layout, dist.get_rank()
        store = None
        if self.rank == 0:
            store, port = host_store("127.0.0.1", TIMEOUT)
        self.port = int(broadcast_bytes(str(port).encode() if self.rank == 0 else None, 0))
        self.store = store or connect_store("127.0.0.1", self.port, TIMEOUT)
        sources, _ = layouts_of(SHAPE, route("any", self.port, layout))
        self.source = cut(sources[self.rank], checkpoint(SHAPE), row_widths(SHAPE))

    def link(self, name: str, tensor: int = 1, timeout: timedelta = TIMEOUT) -> Link:
        if self.rank == 0:
            post(self.folder, name, str(self.port))
        to = route(name, self.port, self.layout, tensor)
        return Link(self.source, SHAPE, to, False, self.store, timeout)

    def change(self, factor: int) -> None:
        """Multiply all weights."""
        for tensor in self.source.values():
            tensor.mul_(factor)

    def find_dead_later(self, name: str) -> None:
        """Do what the hub does when a replica's process has ended.

        Gloo often finds out before. Without the hub, all 4 ranks lost the error (see abandon.py) in 4 of 86
        syncs and waited for the timeout.
        """

        def find() -> None:
            await_note(self.folder, f"{name} dies")
            self.tell_lost_later(name, "its process ended with -9")

        threading.Thread(target=find).start()

    def tell_lost_later(self, name: str, why: str) -> None:
        """Do what the hub does when it finds that a replica is lost."""
        threading.Timer(0.5, tell_lost, (self.store.clone(), name, why)).start()

    def done(self, what: str) -> None:
        if self.rank == 0:
            post(self.folder, what)


def route(name: str, port: int, layout: Layout, tensor: int = 1) -> Route:
    return Route(name, "127.0.0.1", port, Trained(layout, "local"), tensor, (f"member of {name}",))


def train(folder: Path) -> dict[str, Any]:
    """Serve one replica all the time, while others join and die. Return what this rank observed."""
    trainer, seen = Trainer(folder, Layout(2, 1, 2)), dict[str, Any]()
    before = len(os.listdir("/proc/self/fd"))
    good = trainer.link("good")
    seen["first"] = good.sync(1)
    seen["files"] = len(os.listdir("/proc/self/fd")) - before
    for version, name in enumerate(FAILING, 2):
        started = time.monotonic()
        try:
            link = trainer.link(name, timeout=ABSENT if name == "before" else TIMEOUT)
            link.sync(1)
            trainer.done(f"{name} has version 1")
            if name in ("between", "inside") and trainer.rank == 0:
                trainer.find_dead_later(name)
            if name == "between":
                await_note(folder, "between dies")
                time.sleep(0.1)
            if name == "silent" and trainer.rank == 0:
                trainer.tell_lost_later(name, "no sign of life for 60 s")
            started = time.monotonic()
            link.sync(2)
        except LinkLost as lost:
            seen[name] = str(lost), time.monotonic() - started
            seen[f"{name} own world"] = all_gather_bytes(bytes([trainer.rank]))
        trainer.change(-1)
        seen[f"good after {name}"] = good.sync(version).version
        trainer.done(f"{name} is over")
    late = trainer.link("late")
    seen["late"] = late.sync(9)
    for link in (good, late):
        link.close()
    return seen


def train_two(folder: Path) -> dict[str, Any]:
    """Serve a replica of two ranks, one of which a rank is killed inside a sync, and one for which this rank
    has no memory left."""
    trainer = Trainer(folder, Layout())
    good = trainer.link("good", 2)
    seen: dict[str, Any] = {"good": good.sync(1)}
    bad = trainer.link("inside", 2)
    bad.sync(1)
    trainer.done("inside has version 1")
    trainer.find_dead_later("inside")
    started = time.monotonic()
    try:
        bad.sync(2)
    except LinkLost as lost:
        seen["inside"] = str(lost), time.monotonic() - started
    trainer.change(-1)
    good.sync(2)
    good.close()
    full = trainer.link("full")
    full.sync(1)
    trainer.done("full has version 1")
    error = torch.OutOfMemoryError("the GPU is full")
    with mock.patch("megatron_stppo.weights.reshard.execute.Exchange.prepare", side_effect=error):
        try:
            full.sync(2)
        except RuntimeError as raised:
            seen["full"] = f"{type(raised).__name__}: {raised}"
    full.close()
    return seen


def serve(folder: Path, layout: Layout, name: str, versions: tuple[int, ...]) -> list[tuple[float, int]]:
    """Receive these versions. Return, for each, this checkpoint's factor and the version."""
    target, expected, link = _connect(folder, name, layout)
    got = []
    for version in versions:
        report = link.sync(version)
        got.append((_factor(target, expected), report.version))
    link.close()
    return got


def fail(folder: Path, layout: Layout, name: str, on_rank: int = 0) -> str:
    """Receive version 1, then fail in the way that the name says. Return why, and why the link is closed."""
    dies = dist.get_rank() == on_rank
    if name == "before":
        await_note(folder, name)
        os.kill(os.getpid(), signal.SIGKILL)
    target, expected, link = _connect(folder, name, layout)
    buckets = link.sync(1).buckets
    assert buckets >= (3 if dist.get_world_size() == 1 else 2) and _factor(target, expected)
    await_note(folder, f"{name} has version 1")  # the trainer's ranks have got all that this rank sent
    if name == "between":
        post(folder, "between dies")
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "inside" and dies:
        before_a_bucket(link, lambda bucket: _die(folder) if bucket == 1 else None)
    if name == "silent":
        await_note(folder, "silent is over")
    if name == "changed":
        before_a_bucket(link, lambda bucket: target[EMBEDDING][0].add_(bucket == buckets - 1))
    try:
        link.sync(3 if name == "other version" else 2)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    try:
        link.sync(3)
    except RuntimeError as error:
        return f"{said}; {error}"
    return "open"


def _die(folder: Path) -> None:
    post(folder, "inside dies")
    os.kill(os.getpid(), signal.SIGKILL)


def before_a_bucket(link: Link, hook: Callable[[int], object]) -> None:
    """Call the hook before a bucket is packed."""
    link._reshard._on_bucket = hook  # type: ignore[union-attr,assignment]


def _connect(
    folder: Path, name: str, layout: Layout
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Link]:
    """Return this rank's tensors of a replica, the checkpoint's rows for them, and the link."""
    port = int(await_note(folder, name))
    to, widths = route(name, port, layout, dist.get_world_size()), row_widths(SHAPE)
    own = layouts_of(SHAPE, to)[1][layout.world + dist.get_rank()]
    expected = cut(own, checkpoint(SHAPE), widths)
    for rows in padding_rows(own, expected):
        rows.zero_()
    target = blank(own, widths)
    link = Link(target, SHAPE, to, True, connect_store("127.0.0.1", port, TIMEOUT), TIMEOUT)
    return target, expected, link


def _factor(target: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return 1 or -1 if the tensors are the expected ones times 1 or -1, bit for bit, else nan."""
    for factor in (1.0, -1.0):
        if all(torch.equal(target[name], factor * expected[name]) for name in expected):
            return factor
    return float("nan")
