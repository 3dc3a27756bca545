"""A trainer of two ranks with megatron's model, and a replica with vLLM."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.wire.messages import Route, Trained
from tests.replicas.two_programs import await_note, post
from tests.rollout.vllm.tiny import CONTEXT, fill

TIMEOUT = timedelta(seconds=100)
TWO = Layout(tensor=2)


def train(folder: Path) -> Any:
    """Send the checkpoint's weights as version 3, and half of them as version 4."""
    import torch.distributed as dist

    from megatron_stppo.cluster.launch.rendezvous import connect_store, host_store
    from megatron_stppo.config import Config
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.parallel import groups
    from megatron_stppo.replicas.wire.weights import Link
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = Config.model_validate({"model": {"path": folder}, "parallel": {"tensor": 2}})
    mesh = groups.initialize(config.parallel)
    learner = build_learner(config, read_shape(folder), mesh, torch.float32, training=False)
    if dist.get_rank() == 0:
        store, port = host_store("127.0.0.1", TIMEOUT)
        post(folder, "port", str(port))
    else:
        port = int(await_note(folder, "port"))
        store = connect_store("127.0.0.1", port, TIMEOUT)
    learner.load_for("reshard")
    link = Link.from_trainer(learner, route(port), store, TIMEOUT)
    assert link.pack() is None, "the first sync sends everything"
    reports = [link.sync(3)]
    with torch.no_grad():
        for module in learner.policy:
            for parameter in module.parameters():
                parameter.mul_(0.5)
        packed = link.pack()
        for module in learner.policy:
            for parameter in module.parameters():
                parameter.zero_()  # the next update
    assert packed is not None
    return *reports, link.sync(4, packed)


def route(port: int) -> Route:
    return Route("route-1", "127.0.0.1", port, Trained(TWO, "local"), 1, ("member-1",))


def serve(folder: Path) -> dict[str, Any]:
    """Receive versions 3 and 4. Return what differs from the checkpoint, and versions of generated turns."""
    process.prepare()
    from megatron_stppo.replicas.wire.weights import Link
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings
    from megatron_stppo.weights.sharding.hf_names import read_shape

    engine = Engine(EngineSettings(folder, max_context=CONTEXT, max_sequences=16, kv_cache_gib=0.05))
    given = engine.parameters()
    expected = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    fill(expected, folder)
    from megatron_stppo.cluster.launch.rendezvous import connect_store

    port, seen = int(await_note(folder, "port")), dict[str, Any]()
    store = connect_store("127.0.0.1", port, TIMEOUT)
    link = Link(engine.parameters(), read_shape(folder), route(port), True, store, TIMEOUT)
    for version, factor in ((3, 1.0), (4, 0.5)):
        seen[f"report {version}"] = link.sync(version)
        engine.published = lambda version=version: version
        seen[f"differ {version}"] = [n for n in given if not torch.equal(given[n], expected[n] * factor)]
        engine.refresh()
        engine.add("turn", (5, 6, 7), seed=0, max_tokens=2)
        while engine.unfinished:
            seen.update((f"turn {version}", done.versions) for done in engine.step())
    link.close()
    return seen
