"""Assembly of an asynchronous run's trainer: process groups, replicas, models, hub."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_stppo.base.files import replacing
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.launch.doctor import engine_version
from megatron_stppo.cluster.launch.rendezvous import connect_store, host_store
from megatron_stppo.config import Config
from megatron_stppo.data.ledger import Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.learner import build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode, refused_together
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.replicas.wire import address, keys
from megatron_stppo.replicas.wire.ends import Listener
from megatron_stppo.replicas.wire.messages import Trained, limit_of, model_digest
from megatron_stppo.replicas.wire.weights import tell_lost
from megatron_stppo.rollout.episodes.fitting import fitting_tasks
from megatron_stppo.validation import model_layout
from megatron_stppo.weights.sharding.hf_names import read_shape


def assemble(config: Config, resume: bool = False, *, notice: Callable[[], str] = lambda: "") -> Served:
    """Start the replicas, build the models, and return the rollouts of this rank. Collective.

    resume: not used; a replica that cannot reach its tools reports it, and the run ends as a colocated one.
    notice: returns why the run must end soon, or "". Raises ConfigError.
    """
    shape = read_shape(config.model.path)
    model_layout.check_parallel(config, process.world_size())
    model_layout.check_engine(config, process.world_size())
    mesh = process.start(config, is_alone=address.is_loopback(_address(config)))
    dtype = process.dtype(config)
    trained = Trained(mesh.layout, layer_spec(config))
    hub, store = start_hub(config, dtype, trained, notice)
    with timed("models", mesh.rank == 0):
        learner = build_learner(config, shape, mesh, dtype)
    return Served(learner, store, hub, notice)


def start_hub(
    config: Config, dtype: torch.dtype, trained: Trained, notice: Callable[[], str] = lambda: ""
) -> tuple[Hub | None, dist.Store]:
    """Listen for replicas on the first rank, and start those of this machine, which load while the models are
    built. Collective. Raises the first rank's ConfigError on all ranks.

    trained: how the ranks hold the weights. notice: see assemble. Return the hub (None on other ranks), and
    the store of the groups for weights.
    """
    hub, store, at = None, None, ("", 0)
    with refused_together():
        if dist.get_rank() == 0:
            crew, store = _first(config, dtype, trained)
            hub, at = Hub(crew, notice), crew.address
    at = decode(broadcast_bytes(encode(at), 0), tuple[str, int])
    return hub, store or connect_store(at[0], at[1], timedelta(seconds=config.serving.timeout))


def _first(config: Config, dtype: torch.dtype, trained: Trained) -> tuple[Crew, dist.Store]:
    """Return what only the first rank has: the crew and the store."""
    run, serving, r = config.run, config.serving, config.rollout
    assert config.data.train is not None and serving.replicas, "validation/checks.py requires them"
    shape = read_shape(config.model.path)
    expected = Expected(
        model=model_digest(config.model.path),
        vocabulary=shape.vocab,
        dtype=str(dtype).removeprefix("torch."),
        vllm=engine_version(),
        max_context=config.max_context,
        experts=shape.experts,
        routes=(shape.layers, shape.experts_per_token) if config.replays_rollout else (0, 0),
        tensor=model_layout.engine_sizes(shape),
    )
    terms = Terms(
        tasks=r.tasks_per_iteration,
        samples=r.samples_per_task,
        max_staleness=serving.max_staleness,
        order=serving.order,
        resample=r.resample,
    )
    cursor = TaskCursor(fitting_tasks(config, "train", shown=True).tasks, run.seed)
    ledger = EpisodeLedger(cursor, terms, run.seed, r.temperature, r.top_p)
    listener, host = _listen(config), _address(config)
    local = _local(config) if serving.start else None
    if local is None:
        here = ", on this machine only (serving.address)" if address.is_loopback(host) else ""
        say(
            f"listening at {listener.connection.address} for replicas{here}: start {serving.replicas} with "
            f"`megatron-stppo serve {run.folder}`"
        )
    store, port = host_store(host, timedelta(seconds=serving.timeout))

    def tell(group: str, why: str) -> None:
        # over a connection of its own, in which no other thread waits
        tell_lost(store.clone(), group, why)  # type: ignore[attr-defined]  # missing in torch's stubs

    crew = Crew(listener, ledger, expected, (host, port), trained, serving.timeout, local, tell)
    return crew, store


def _listen(config: Config) -> Listener:
    """Listen for replicas, and write what they read: the configuration, and where to connect."""
    run = config.run.folder
    keys.remove(run)
    listener = Listener(_address(config), limit_of(config, read_shape(config.model.path)))
    keys.make_folder(run)
    for name, text in (
        (keys.CONFIG, config.absolute().dump()),
        (keys.MODULES, str((config.environment.modules or run / keys.FOLDER).absolute())),
    ):
        with replacing(run / keys.FOLDER / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
    keys.write(run, listener.connection)  # after the configuration: replicas wait for this file
    return listener


def _local(config: Config) -> LocalReplicas:
    names = [f"replica-{i}" for i in range(config.serving.replicas or 0)]
    say(f"starting replicas: {len(names)}; their output is in {config.run.folder}/logs")
    return LocalReplicas(
        config.run.folder,
        names,
        config.rollout.engine_restarts,
        tensor=config.engine_tensor,
        trainer=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def _address(config: Config) -> str:
    return address.find(config.serving.address, config.serving.start, os.environ)
