"""The command `serve`: one replica of an asynchronous run, on one of its ranks."""

from __future__ import annotations

from megatron_stppo.config import Config
from megatron_stppo.launch import process
from megatron_stppo.replicas.replica import start
from megatron_stppo.worker import build_engine


def serve(config: Config, started: start.Started) -> None:
    """Serve until the run ends. Collective. Raises as start.serve does."""
    routes = config.replays_rollout
    start.serve(config, started, lambda: build_engine(config, process.dtype(config), routes=routes))
