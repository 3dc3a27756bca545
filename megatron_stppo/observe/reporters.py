"""Destinations of rows besides metrics.jsonl and tensorboard/."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_stppo.config import Config


class Reporter(Protocol):
    """A destination of rows."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl."""

    def close(self) -> None: ...


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
