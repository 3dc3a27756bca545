"""A real trainer, and replicas whose engine is only its weights: programs that start in a second.

Version v of the weights is the checkpoint, multiplied by 1 + v / 64.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_stppo.cluster.launch.rendezvous import connect_store
from megatron_stppo.config import Config
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.learner import build_learner
from megatron_stppo.parallel import groups
from megatron_stppo.replicas.replica.replica import Replica
from megatron_stppo.replicas.replica.start import first_rank
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.replicas.trainer.start import start_hub
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.messages import Route, Trained
from megatron_stppo.replicas.wire.weights import Link
from megatron_stppo.training.rollouts import rollout_settings
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts
from tests.replicas.two_programs import Programs, run_programs
from tests.rollout.vllm.tiny import Game, build_model, build_tokenizer
from tests.weights.reshard.pieces import blank, cut, padding_rows

TIMEOUT = timedelta(seconds=60)
TASK = (
    '{"data_source": "test", "prompt": [{"role": "user", "content": "Which city?"}], '
    '"reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}}\n'
)


@dataclass(frozen=True)
class Dies:
    """The first replica that comes to this point is killed: `gives` or `receives` a version, in a bucket."""

    version: int
    gives: bool
    bucket: int = 1


def write_project(folder: Path, vocabulary: int) -> Path:
    """Write a model of vocabulary x 64 numbers, and a bit, and a data set. Return the model's folder."""
    (folder / "tasks.jsonl").write_text(TASK)
    build_model(folder / "model", vocabulary=vocabulary)
    return folder / "model"


def config(folder: Path, replicas: int, *, tensor: int = 1, engine_tensor: int = 1) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder / "model"},
            "run": {"root": folder, "name": "run"},
            "data": {"train": folder / "tasks.jsonl"},
            "parallel": {"tensor": tensor},
            "serving": {"replicas": replicas, "start": False, "timeout": 20},
            "rollout": {
                "max_prompt_tokens": 60,
                "max_turn_tokens": 40,
                "max_context": 256,
                "engine_tensor": engine_tensor,
            },
        }
    )


def train(folder: Path, replicas: int, versions: int) -> list[dict[str, float]]:
    """Publish each version when all replicas have the last one. Return, for each after 0, what it cost."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # all ranks are on this machine
    given = config(folder, replicas, tensor=dist.get_world_size())
    mesh, shape = groups.initialize(given.parallel), read_shape(folder / "model")
    learner = build_learner(given, shape, mesh, torch.float32, training=False)
    hub, store = start_hub(given, torch.float32, Trained(mesh.layout, layer_spec(given)))
    served = Served(learner, store, hub)
    rows: list[dict[str, float]] = []
    for version in range(versions + 1):
        set_version(learner, version)
        began = time.monotonic()
        served.publish(version)
        blocked = time.monotonic() - began
        set_version(learner, 1000)  # what a thread sends is a copy
        served._sender.join()
        set_version(learner, version)  # what is sent again is not
        served._until(lambda h, v=version: _have(h, v) or None)
        row = {"blocked": blocked, "sent": float(served._sender.sent), "lost": 0.0}
        served._sender.sent = 0
        if hub is not None:
            numbers = hub.ask(Crew.numbers)
            row |= {"all": numbers["update_seconds"], "lost": numbers["lost"], "serve": numbers["replicas"]}
        rows.append(row)
    set_version(learner, versions + 1)
    served.publish(versions + 1)  # the run ends while it is sent
    # on a busy machine all may have it before this thread looks
    while hub is not None and not (hub._crew.tree.is_moving or _have(hub, versions + 1)):
        time.sleep(0.001)
    served.close()
    assert hub is None or hub.ask(Crew.numbers)["lost"] == rows[-1]["lost"]
    return rows[1:]


def _have(hub: Any, version: int) -> bool:
    """Return whether all replicas have a version."""
    return all(node.version == version for node in hub._crew.tree.nodes.values())


def set_version(learner: Any, version: int) -> None:
    """Multiply all weights, which may have another version."""
    now = getattr(learner, "test_version", 0)
    with torch.no_grad():
        for tensor in build.named_parameters(learner.policy).values():
            tensor.mul_((64 + version) / (64 + now))
    learner.test_version = version


class LightEngine:
    """The weights of an engine. `seen` has the versions that arrived, with their factor."""

    def __init__(self, model: Path, dies: Dies | None) -> None:
        self.model, self.dies, self.group = model, dies, None
        shape, world = read_shape(model), dist.get_world_size()
        own, widths = serving_layouts(shape, world, world)[dist.get_rank()], row_widths(shape)
        self._expected = cut(own, load_file(model / "model.safetensors"), widths)
        for rows in padding_rows(own, self._expected):
            rows.zero_()
        self._own = blank(own, widths)
        self.seen: list[tuple[int, bool]] = []
        self.unfinished = self.computed_tokens = 0
        self.vocabulary, self.tokenizer, self.end_ids = shape.vocab, build_tokenizer(), (0,)
        self.published: Any = None

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._own

    def settle(self) -> list[Any]:
        return []

    def refresh(self, *, recompute: bool = False) -> int:
        version = self.published()
        same = all(
            torch.allclose(self._own[name], tensor * (1 + version / 64), rtol=1e-5, atol=0)
            for name, tensor in self._expected.items()
        )
        self.seen.append((version, same))
        return int(version)


def serve(folder: Path, name: str, dies: Dies | None = None) -> tuple[str, list[tuple[int, bool]]]:
    """Serve as a replica. Return why it ended, and what it got."""
    given, shape = config(folder, 1, engine_tensor=dist.get_world_size()), read_shape(folder / "model")
    engine: Any = LightEngine(folder / "model", dies)
    connection, notice = keys.find(folder / "run", 60), SimpleNamespace(reason="")

    def link(route: Route, receives: bool) -> Link:
        store = connect_store(route.host, route.port, TIMEOUT)
        made = Link(engine.parameters(), shape, route, receives, store, TIMEOUT)
        if dies is not None and dies.gives != receives:
            die_in(made, dies, folder)
        return made

    limits, phase = rollout_settings(given).limits, lambda name: nullcontext()
    if dist.get_rank():
        return _run(Replica(engine, limits, link, phase, None), engine)
    with first_rank(given, connection, notice, name, engine, Game) as first:  # type: ignore[arg-type]
        return _run(Replica(engine, limits, link, phase, first), engine)


def _run(replica: Replica, engine: Any) -> tuple[str, list[tuple[int, bool]]]:
    end = replica.run()
    replica.close()
    return f"{end.kind}: {end.text}", engine.seen


def die_in(link: Link, dies: Dies, folder: Path) -> None:
    """Kill this process in a bucket of the sync to a version, if no other one was killed."""
    sync = link.sync

    def dying(version: int, packed: Any = None) -> Any:
        if version == dies.version:
            link._reshard._on_bucket = die  # type: ignore[union-attr]
        return sync(version, packed)

    def die(bucket: int) -> None:
        if bucket == dies.bucket:
            try:
                (folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    link.sync = dying  # type: ignore[method-assign]


def main() -> None:
    """Measure publications: python -m tests.replicas.light 1 2 4 8"""
    print(
        "| replicas | trainer waits, s | MB that it sends | s until all have the version |\n|---|---|---|---|"
    )
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_project(folder, 200_000)
            programs: Programs = {"trainer": (train, 1, (folder, count, 9))}
            programs |= {f"r{n}": (serve, 1, (folder, f"r{n}")) for n in range(count)}
            (rows,) = run_programs(programs)["trainer"].result()
        blocked, sent, every = (
            statistics.median(row[key] for row in rows) for key in ("blocked", "sent", "all")
        )
        print(f"| {count} | {blocked:.3f} | {sent / 1e6:.1f} | {every:.2f} |", flush=True)


if __name__ == "__main__":
    main()
