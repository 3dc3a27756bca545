"""Assembly of an asynchronous run's trainer: process groups, replicas, models, hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megatron_stppo.base.files import replacing
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.launch.rendezvous import connect_store, host_store
from megatron_stppo.cluster.launch.vllm_environment import PINNED_VLLM
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.model.learner import build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode
from megatron_stppo.parallel.raise_together import raise_together
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.groups import Terms
from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.trainer.ledger import Ledger
from megatron_stppo.replicas.trainer.local import LocalReplicas, Serving, check_gpus
from megatron_stppo.replicas.trainer.measure import ServingMeter
from megatron_stppo.replicas.trainer.recorded import Recorded
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.replicas.wire import address, keys
from megatron_stppo.replicas.wire.digest import model_digest
from megatron_stppo.replicas.wire.listener import Listener
from megatron_stppo.replicas.wire.losses import tell_lost
from megatron_stppo.replicas.wire.payloads import limit_of
from megatron_stppo.rollout.episodes.playable import playable
from megatron_stppo.validation import model_layout
from megatron_stppo.weights.sharding.hf_names import read_shape


def assemble(
    config: Config,
    resume: bool = False,
    *,
    recorded: Recorded | None = None,
    notice: Callable[[], str] = lambda: "",
) -> Served:
    """Start the replicas, build the models, and return the rollouts of this rank. Collective.

    resume: not used; a replica that cannot reach its tools reports it, and the run ends as a colocated one.
    recorded: the run to repeat. notice: returns why the run must end soon, or "". Raises ConfigError.
    """
    shape = read_shape(config.model.path)
    model_layout.check_parallel(config, process.world_size())
    model_layout.check_engine(config, process.world_size())
    mesh = process.start(config, is_alone=address.is_loopback(_address(config)))
    dtype = process.dtype(config)
    first = start_first(config, dtype, recorded)
    with timed("models", mesh.rank == 0):
        learner = build_learner(config, shape, mesh, dtype)
    store, at = _store(config)
    hub = first.hub(store, notice) if first else None
    return Served(learner, store, at, hub, first.ledger if first else None, ServingMeter())


@dataclass(frozen=True)
class _First:
    """What only the first rank has."""

    config: Config
    listener: Listener
    ledger: Ledger
    local: LocalReplicas | None
    expected: Expected
    recorded: Recorded | None

    @classmethod
    def start(cls, config: Config, dtype: torch.dtype, recorded: Recorded | None) -> _First:
        """Listen for replicas, and start those of this machine, which load while the models are built."""
        run, serving = config.run, config.serving
        assert config.data.train is not None and serving.replicas, "validation/checks.py requires them"
        shape = read_shape(config.model.path)
        expected = Expected(
            model=model_digest(config.model.path),
            vocabulary=shape.vocab,
            dtype=str(dtype).removeprefix("torch."),
            vllm=PINNED_VLLM,
            max_context=config.max_context,
            experts=shape.experts,
            routes=(shape.layers, shape.experts_per_token) if config.replays_rollout else (0, 0),
            tensor=model_layout.engine_sizes(shape),
        )
        cursor = TaskCursor(playable(config, "train", shown=True).tasks, run.seed)
        keys.remove(run.folder)
        listener = Listener(_address(config), limit_of(config, shape))
        keys.make_folder(run.folder)
        for name, text in (
            (keys.CONFIG, config.absolute().dump()),
            (keys.MODULES, str((config.environment.modules or run.folder / keys.FOLDER).absolute())),
        ):
            with replacing(run.folder / keys.FOLDER / name) as scratch:
                scratch.write_text(text, encoding="utf-8")
        keys.write(run.folder, listener.connection)  # after the configuration: replicas wait for this file
        local = _local(config, recorded) if serving.start or recorded else None
        count = len(recorded.names) if recorded else serving.replicas
        if local is not None:
            say(f"starting replicas: {count}; their output is in {run.folder}/logs")
        else:
            at = _address(config)
            here = ", on this machine only (serving.address)" if address.is_loopback(at) else ""
            say(
                f"listening at {listener.connection.address} for replicas{here}: start {count} with "
                f"`megatron-stppo serve {run.folder}`"
            )
        ledger = Ledger(cursor, _terms(config), recorded.batches if recorded else ())
        return cls(config, listener, ledger, local, expected, recorded)

    def hub(self, store: dist.Store, notice: Callable[[], str]) -> Hub:
        """store: of the groups for weights. notice: see assemble."""
        return Hub(
            self.listener,
            self.ledger,
            self.expected,
            self.config.serving.timeout,
            self.local,
            self.recorded.played if self.recorded else None,
            # a connection of its own, in which no other thread waits
            partial(tell_lost, store.clone()),  # type: ignore[attr-defined]  # missing in torch's stubs
            notice,
            completes=self.config.serving.update == "complete",
        )


def start_first(config: Config, dtype: torch.dtype, recorded: Recorded | None) -> _First | None:
    """Return what only the first rank has; None on the others. Collective. Raises its ConfigError on all."""
    first, misuse = None, None
    if dist.get_rank() == 0:
        try:
            first = _First.start(config, dtype, recorded)
        except ConfigError as error:
            misuse = str(error)
    raise_together(misuse, lambda failures: ConfigError(failures[0]), str)
    return first


def _terms(config: Config) -> Terms:
    r, s = config.rollout, config.serving
    return Terms(
        tasks=r.tasks_per_iteration,
        samples=r.samples_per_task,
        max_staleness=s.max_staleness,
        order=s.order,
        seed=config.run.seed,
        temperature=r.temperature,
        top_p=r.top_p,
        resample=r.resample,
    )


def _local(config: Config, recorded: Recorded | None) -> LocalReplicas:
    names = recorded.names if recorded else [f"replica-{i}" for i in range(config.serving.replicas or 0)]
    count, tensor = len(names), config.engine_tensor
    trainer = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = process.threads(trainer + count * tensor)
    first_gpu = check_gpus(trainer, count, tensor)
    arguments = ("--replay-from", str(recorded.run)) if recorded else ()
    serving = Serving(config.run.folder, tensor, arguments, threads, first_gpu)
    return LocalReplicas(serving, names, 0 if recorded else config.rollout.engine_restarts)


def _address(config: Config) -> str:
    return address.find(config.serving.address, config.serving.start, os.environ)


def _store(config: Config) -> tuple[dist.Store, tuple[str, int]]:
    """Return the store of the groups for weights, with its host and port. Collective."""
    timeout = timedelta(seconds=config.serving.timeout)
    store: dist.Store | None = None
    at = ("", 0)
    if dist.get_rank() == 0:
        host = _address(config)
        store, port = host_store(host, timeout)
        at = (host, port)
    at = decode(broadcast_bytes(encode(at), 0), tuple[str, int])
    return store or connect_store(at[0], at[1], timeout), at
