"""Assembly of a replica of an asynchronous run, on one of its ranks."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.launch.doctor import engine_version
from megatron_stppo.cluster.launch.rendezvous import connect_store
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.config import Config
from megatron_stppo.environments.base import AnyEnvironment
from megatron_stppo.observe.console import say, timed
from megatron_stppo.parallel.collectives import broadcast_bytes
from megatron_stppo.replicas.replica.news import NewsSource
from megatron_stppo.replicas.replica.replica import Replica, raise_failure
from megatron_stppo.replicas.wire.address import is_loopback
from megatron_stppo.replicas.wire.ends import Dialer
from megatron_stppo.replicas.wire.keys import FOLDER, Connection
from megatron_stppo.replicas.wire.measure import Activity
from megatron_stppo.replicas.wire.messages import Hello, Route, limit_of, model_digest, process_name
from megatron_stppo.replicas.wire.weights import Link
from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost, ToolWait
from megatron_stppo.rollout.episodes.play import OneVersion
from megatron_stppo.rollout.vllm.engine import Engine
from megatron_stppo.training.rollouts import rollout_settings
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.low_rank import served_adapters

ONE_VERSION: dict[str, OneVersion] = {"recompute": "", "drain": "turn", "complete": "episode"}


def serve(
    config: Config,
    run: Path,
    connection: Connection,
    notice: PreemptionNotice,
    name: str,
    build_engine: Callable[[], Engine],
    open_environment: Callable[[Config, bool], Callable[[], AnyEnvironment]],
) -> None:
    """Serve until the run ends, or until a signal ends the replica. Collective.

    run: the run's folder. name: "": host and process id. build_engine, open_environment: called when the
    ranks are connected. Raises ConfigError if the trainer does not accept the replica, or for an environment
    that is used wrongly; CannotServe and EngineFailure if the replica cannot continue.
    """
    process.join(config.timeout, is_alone=is_loopback(connection.host))
    rank = dist.get_rank()
    # the characters of the host's name that a file's name may have
    default = re.sub(r"[^A-Za-z0-9_.-]", "-", process_name(os.getpid())).lstrip(".")[-64:]
    name = broadcast_bytes((name or default).encode() if rank == 0 else None, 0).decode()
    process.log_to(run, rank, f"{name}-")
    deadlines = config.deadline_by_phase
    with Watchdog(run / FOLDER / name, deadlines, rank, dist.get_world_size()) as watchdog:
        with timed("engine", rank == 0):
            engine = build_engine()
        make_environment = open_environment(config, True)
        timeout, shape = timedelta(seconds=config.serving.timeout), read_shape(config.model.path)
        limits, adapters = rollout_settings(config).limits, served_adapters(config.model.lora, shape)

        def link(route: Route, receives: bool) -> Link:
            store = connect_store(route.host, route.port, timeout)
            return Link(engine.parameters(), shape, route, receives, store, timeout, adapters)

        def play(first: NewsSource | None) -> None:
            one_version = ONE_VERSION[config.serving.update]
            _serve(Replica(engine, limits, link, watchdog.phase, first, one_version), engine)

        if rank:
            return play(None)
        with first_rank(config, connection, notice, name, engine, make_environment) as first:
            play(first)


def _serve(replica: Replica, engine: Engine) -> None:
    end = replica.run()
    dist.barrier()  # a rank that exits early would break collectives of the others
    replica.close()
    engine.close()
    process.stop()
    raise_failure(end)
    say(f"the replica has ended: {end.text}", process.rank() == 0)


@contextmanager
def first_rank(
    config: Config,
    connection: Connection,
    notice: PreemptionNotice,
    name: str,
    engine: Engine,
    make_environment: Callable[[], AnyEnvironment],
) -> Iterator[NewsSource]:
    """Connect to the trainer, and start the thread of the environments."""
    activity, e = Activity(), config.environment
    limit = limit_of(config, read_shape(config.model.path))
    dialer = Dialer(connection, limit, lambda: activity.counters)
    try:
        with EnvironmentHost(
            make_environment,
            concurrency=e.concurrency,
            deadline=e.deadline,
            tools=ToolWait(e.tool_wait),
            answered=dialer.wake,
        ) as host:
            dialer.send(
                Hello(
                    name=name,
                    model=model_digest(config.model.path),
                    vocabulary=engine.vocabulary,
                    dtype=str(process.dtype(config)).removeprefix("torch."),
                    vllm=engine_version(),
                    tensor=config.engine_tensor,
                    capacity=config.serving.concurrency or config.rollout.max_sequences,
                    process=process_name(os.getpid()),
                )
            )
            yield NewsSource(
                dialer=dialer,
                host=host,
                activity=activity,
                timeout=config.serving.timeout,
                records=not config.replays_rollout,
                drain=config.serving.update == "drain",
                awaits_answers=not config.rollout.overlap_tools,
                asked_to_leave=lambda: notice.reason,
            )
    finally:
        dialer.close()
