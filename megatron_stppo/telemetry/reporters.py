"""Reporters: destinations of rows besides metrics.jsonl and tensorboard/, enabled in `telemetry:`."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from megatron_stppo.config import Config, ConfigError

LOOPBACK = "127.0.0.1"


class Reporter(Protocol):
    """A destination of rows."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl."""

    def close(self) -> None: ...


def reporters(config: Config, rank: int) -> list[Reporter]:
    """Return the reporters of rank 0; other ranks have none. Raises ConfigError if the port is in use."""
    telemetry, found = config.telemetry, list[Reporter]()
    if rank == 0 and telemetry.prometheus_port is not None:
        found.append(Prometheus(telemetry.prometheus_port, config.run.name))
    if rank == 0 and telemetry.wandb_project is not None:
        found.append(WeightsAndBiases(config))
    return found


class Prometheus:
    """Serves the last row's numbers on http://127.0.0.1:PORT/metrics, for a scraper or a tunnel on this node.

    Example: "share/rollout" of run small becomes `stppo_share_rollout{run="small"} 0.75`.
    """

    def __init__(self, port: int, run: str) -> None:
        self._last = _LastRow(run)
        registry = CollectorRegistry()
        registry.register(self._last)
        try:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.prometheus_port={port}: {error.strerror}; choose another, or remove the field"
            ) from None

    def write(self, row: Mapping[str, Any]) -> None:
        self._last.row = dict(row)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _LastRow(Collector):
    def __init__(self, run: str) -> None:
        self.row: dict[str, Any] = {}
        self._run = run

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self.row.items():
            if isinstance(value, int | float):
                gauge = GaugeMetricFamily(metric_name(name), name, labels=["run"])
                gauge.add_metric([self._run], value)
                yield gauge


def metric_name(name: str) -> str:
    return "stppo_" + re.sub("[^A-Za-z0-9_]", "_", name)


class WeightsAndBiases:
    """Sends rows and the resolved configuration to a Weights & Biases run of the group run.name.

    The key comes from WANDB_API_KEY or the user's netrc, never from the configuration. wandb does not record
    the machine, the program's output or its source. A resumed attempt is a new run at Weights & Biases.
    """

    def __init__(self, config: Config) -> None:
        wandb = importlib.import_module("wandb")  # optional: validation/checks.py has checked it
        silent = {"console": "off", "disable_git": True, "save_code": False, "disable_job_creation": True}
        private = {"x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True}
        self._run = wandb.init(
            project=config.telemetry.wandb_project,
            mode=config.telemetry.wandb_mode,
            group=config.run.name,
            dir=str(config.run.folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(**silent, **private),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row), step=row["iteration"])

    def close(self) -> None:
        self._run.finish()
