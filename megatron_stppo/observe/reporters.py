"""Destinations of rows besides metrics.jsonl.

A reporter may fail at any time: Metrics then warns once and drops its rows.
"""

import importlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_stppo.base.printing import one_line
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.parallel.abandon import call_unless

UPLOAD = 10.0  # seconds that the end of a run waits for Weights & Biases
log = logging.getLogger(__name__)


class Reporter(Protocol):
    """A destination of rows."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes the numbers of rows to files of TensorBoard."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        """purge_step: hides the points that earlier attempts have written from there on. Raises ConfigError
        if the package cannot be imported."""
        with _importing("tensorboard"):
            self._module = importlib.import_module("torch.utils.tensorboard")
        self._folder, self._purge_step = folder, purge_step
        self._board: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        if self._board is None:
            self._board = self._module.SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in row.items():
            if isinstance(value, int | float) and name != "iteration":
                self._board.add_scalar(name, value, row["iteration"])
        self._board.flush()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class WeightsAndBiases:
    """Sends rows and the resolved configuration to a Weights & Biases run of the group run.name.

    The key comes from WANDB_API_KEY or the user's netrc, never from the configuration. wandb does not record
    the machine, the program's output or its source. A resumed attempt is a new run at Weights & Biases.
    """

    def __init__(self, config: Config, resume: bool = False) -> None:
        """Begin a run there. Raises ConfigError if this fails, but if the package can be imported, a resumed
        run continues without it: its network may be down."""
        field = f"telemetry.wandb_project={config.telemetry.wandb_project}"
        with _importing("wandb", f"{field}: ", ", or remove the field"):
            wandb = importlib.import_module("wandb")
        silent = {"console": "off", "disable_git": True, "save_code": False, "disable_job_creation": True}
        private = {"x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True}
        self._run: Any = None
        try:
            self._run = wandb.init(
                project=config.telemetry.wandb_project,
                mode=config.telemetry.wandb_mode,
                group=config.run.name,
                dir=str(config.run.folder),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(**silent, **private),
            )
        except Exception as error:
            failed = f"{field}: wandb.init has failed: {one_line(str(error))}"
            if not resume:
                remedy = "set WANDB_API_KEY or give `wandb login`, or set telemetry.wandb_mode=offline"
                raise ConfigError(f"{failed}; {remedy}") from error
            log.warning("%s; its rows are dropped", failed)

    def write(self, row: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log(dict(row), step=row["iteration"])

    def close(self) -> None:
        """Wait for the upload. wandb would wait for a lost network as long as it takes."""
        if self._run is not None:
            ends = time.monotonic() + UPLOAD
            late = f"not uploaded after {UPLOAD:g} s; `wandb sync` does it"
            call_unless(
                self._run.finish, lambda: late if time.monotonic() > ends else "", release=lambda why: None
            )


@contextmanager
def _importing(package: str, field: str = "", remedy: str = "") -> Iterator[None]:
    """Raise ConfigError if the block cannot import the package."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(str(error))}"
        raise ConfigError(
            f"{field}the package {package} cannot be imported ({why}); install it again{remedy}"
        ) from error
